// The page: which conversation is shown, answers that are being streamed, and what keys and buttons do.

const CURRENT_ENTRY = "yalis.current";
const DRAFT_ENTRY = "yalis.draft";
const SAVE_EVERY_MS = 1000;
const MAX_AUTOMATIC_RETRIES = 5;
const SUGGESTIONS = [
  "Explain how a transformer generates text, in five sentences.",
  "Write a Python function that merges two sorted lists.",
  "Plan a quiet weekend in the mountains.",
];

const store = new ConversationStore(showNotice);
const running = new Map(); // conversation id -> AbortController of its answer
const views = new Map(); // message on the page -> MessageView
let current;
let model = "";
let followsEnd = true;
let leaving = false; // the browser ends the requests of a page that is left, which is no failure
let drawing = false;

function showNotice(sentence) {
  byId("notice").textContent = sentence;
  byId("notice").hidden = !sentence;
}

// What is shown

function open(conversation) {
  current = conversation;
  remember("sessionStorage", CURRENT_ENTRY, conversation.id);
  drawMessages();
  scrollToEnd(true);
  drawList();
  showSidebar(false);
  focusInput();
}

function focusInput() {
  (isTouch() ? byId("log") : byId("input")).focus({ preventScroll: true });
}

function drawList() {
  const handlers = { open: (id) => open(store.all.get(id)), rename, remove, save: exportOne };
  drawSidebar(store.list(), current.id, running, handlers);
  byId("title").textContent = current.title;
  document.title = current.messages.length ? `${current.title} · YALIS chat` : "YALIS chat";
  const busy = running.has(current.id);
  byId("send").setAttribute("aria-label", busy ? "Stop" : "Send");
  byId("send").querySelector("use").setAttribute("href", busy ? "#i-stop" : "#i-send");
  byId("send").classList.toggle("stops", busy);
}

function drawMessages() {
  views.clear();
  for (const message of current.messages) views.set(message, new MessageView(message, { regenerate, edit }));
  const shown = [...views.values()].map((view) => view.root);
  byId("messages").replaceChildren(...(shown.length ? shown : [makeWelcome()]));
}

function makeWelcome() {
  const ideas = SUGGESTIONS.map((text) => textButton(text, "idea", () => {
    focusInput(); // before the button is removed
    send(text);
  }));
  const who = model ? `Ask ${model.split("/").at(-1)}` : "Ask";
  const title = make("h2", {}, `${who} anything`);
  return make("section", { class: "welcome" }, title, make("div", { class: "ideas" }, ...ideas));
}

/** Show what arrived since the last frame. */
function drawSoon(message) {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    views.get(message)?.update();
    scrollToEnd();
  });
}

/** Keep the end in view, unless the reader has scrolled up. */
function scrollToEnd(always = false) {
  const log = byId("log");
  followsEnd ||= always;
  if (followsEnd) log.scrollTop = log.scrollHeight;
}

// Answers

function send(text) {
  if (running.has(current.id)) return;
  if (!current.messages.length && !current.renamed) current.title = titleOf(text);
  current.messages.push({ role: "user", text, created: Date.now() });
  answer(current);
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length <= 48 ? line : `${line.slice(0, 48).replace(/\s+\S*$/, "")}…`;
}

/** Stream an answer to the last message of a conversation, which need not be the one that is shown. */
async function answer(conversation, retries = 0) {
  const message = { role: "assistant", text: "", state: "streaming", model, created: Date.now() };
  const request = requestBody(model, conversation, conversation.messages);
  const stopping = new AbortController();
  conversation.messages.push(message);
  running.set(conversation.id, stopping);
  touch(conversation);
  if (conversation === current) {
    drawMessages();
    scrollToEnd(true);
  }
  let failure = null;
  try {
    await receive(request, conversation, message, stopping.signal);
    message.state = "done";
  } catch (error) {
    message.state = "stopped";
    if (error.name !== "AbortError" && !leaving) failure = error;
  }
  settle(conversation.id, stopping);
  if (failure) {
    if (failure.status === 404) model = ""; // the server was started with another one
    if (!(failure instanceof ApiFailure)) console.error(failure);
    message.error = failure instanceof ApiFailure ? failure.message : `The page failed: ${failure.message}`;
  }
  if (store.all.get(conversation.id) !== conversation) return; // deleted meanwhile
  touch(conversation);
  views.get(message)?.update();
  scrollToEnd();
  announce(failure ? message.error : message.state === "stopped" ? "Stopped." : "The answer is complete.");
  if (failure) await recover(failure, conversation, message, retries);
}

async function receive(request, conversation, message, signal) {
  const clock = new AnswerClock();
  let saved = performance.now();
  let usage = null;
  try {
    if (!request.model) request.model = message.model = await loadModel();
    for await (const part of streamAnswer(request, signal)) {
      if (part.text) {
        clock.tick();
        message.text += part.text;
        if (conversation === current) drawSoon(message);
      }
      message.finish = part.finish ?? message.finish;
      usage = part.usage ?? usage;
      if (performance.now() - saved > SAVE_EVERY_MS) {
        store.save(conversation);
        saved = performance.now();
      }
    }
  } finally {
    message.stats = clock.stats(usage);
  }
}

/** After a failure that a key or some patience cures, send the request again. */
async function recover(failure, conversation, message, retries) {
  const again = (count) => {
    if (conversation.messages.at(-1) !== message || running.has(conversation.id)) return;
    conversation.messages.pop();
    answer(conversation, count);
  };
  if (failure.status === 401) {
    const reason = recall("sessionStorage", KEY_ENTRY) ? "The server refused this key." : failure.message;
    if (await askForKey(reason)) again(retries);
  } else if (failure.status === 429 && failure.retryAfter !== null && retries < MAX_AUTOMATIC_RETRIES) {
    const waiting = new AbortController();
    running.set(conversation.id, waiting);
    drawList();
    const waited = await waitFor(failure.retryAfter, waiting.signal, (seconds) => {
      message.error = `${failure.message} Next attempt in ${seconds} s.`;
      views.get(message)?.update();
    });
    settle(conversation.id, waiting);
    message.error = failure.message;
    views.get(message)?.update();
    drawList();
    if (waited) again(retries + 1);
  }
}

/** Wait some seconds; false if the signal was aborted. `tell` gets the seconds that are left. */
async function waitFor(seconds, signal, tell) {
  for (let left = Math.ceil(seconds); left > 0 && !signal.aborted; left--) {
    tell(left);
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, Math.min(1, seconds) * 1000);
      signal.addEventListener("abort", () => {
        clearTimeout(timer);
        resolve();
      });
    });
  }
  return !signal.aborted;
}

function stop(id) {
  running.get(id)?.abort();
  running.delete(id);
}

/** An answer has ended; another one may already have begun in its conversation. */
function settle(id, controller) {
  if (running.get(id) === controller) running.delete(id);
}

/** Answer again. What followed is removed, and can be brought back for a while. */
function regenerate(message) {
  focusInput();
  removeFrom(message, "The earlier answer was replaced.");
  answer(current);
}

function edit(message, text) {
  if (message.role === "assistant") {
    message.text = text;
    touch(current);
    drawMessages();
    return;
  }
  focusInput();
  removeFrom(message, "The earlier version was replaced.");
  send(text);
}

/** Remove a message and what follows. Offers to undo this if it removes text of the model. */
function removeFrom(message, sentence) {
  stop(current.id);
  const before = structuredClone(current);
  current.messages.splice(current.messages.indexOf(message));
  const lost = before.messages.slice(current.messages.length);
  if (lost.some((one) => one.role === "assistant" && one.text)) offerUndo(sentence, () => restore(before));
}

// Conversations

function touch(conversation) {
  conversation.updated = Date.now();
  store.save(conversation);
  drawList();
}

function startNew() {
  open(newConversation(settingsForNewChats()));
}

function rename(id, title) {
  const conversation = store.all.get(id);
  if (title !== conversation.title) Object.assign(conversation, { title, renamed: true });
  store.save(conversation);
  drawList();
}

function remove(id) {
  const conversation = store.all.get(id);
  stop(id);
  store.remove(id);
  if (id === current.id) startNew();
  else drawList();
  offerUndo(`“${conversation.title}” was deleted.`, () => restore(conversation));
}

function restore(conversation) {
  stop(conversation.id);
  for (const message of conversation.messages) if (message.state === "streaming") message.state = "stopped";
  store.save(conversation);
  open(conversation);
}

function exportOne(id) {
  const conversation = store.all.get(id);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  download(`${name || "chat"}.json`, JSON.stringify(exported(conversation), null, 2));
}

function offerUndo(sentence, undo) {
  const toast = make("div", { class: "toast", role: "status" }, sentence);
  const close = () => toast.remove();
  toast.append(textButton("Undo", "plain", () => {
    close();
    undo();
  }));
  byId("toasts").replaceChildren(toast);
  setTimeout(close, 12000);
}

// Set-up

async function loadModel() {
  model = await fetchModel();
  byId("model").textContent = model.split("/").at(-1);
  byId("model").title = model;
  if (!current.messages.length) drawMessages();
  return model;
}

async function greet() {
  try {
    await loadModel();
    showNotice("");
  } catch (error) {
    const refused = error.status === 401;
    const reason = refused && recall("sessionStorage", KEY_ENTRY) ? "The server refused this key." : error.message;
    if (refused && (await askForKey(reason))) await greet();
    else if (!refused) byId("model").textContent = "not connected";
  }
}

function onKey(event) {
  const command = event.ctrlKey || event.metaKey;
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && document.body.classList.contains("sidebar-open")) showSidebar(false);
  else if (event.key === "Escape" && running.has(current.id)) stop(current.id);
  else if (command && event.shiftKey && event.code === "KeyO") startNew();
  else if (command && event.key === ",") openSettings();
  else if (command && event.key === "/") showDialog(byId("keys"));
  else if (event.altKey && event.key === "ArrowUp") openNeighbour(-1);
  else if (event.altKey && event.key === "ArrowDown") openNeighbour(1);
  else return;
  event.preventDefault();
}

function openNeighbour(step) {
  const all = store.list();
  const at = all.findIndex((one) => one.id === current.id);
  const next = at < 0 ? all[0] : all[at + step];
  if (next) open(next);
}

function onInputKey(event) {
  if (isSendKey(event)) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !byId("input").value && !event.altKey && !running.has(current.id)) {
    const last = current.messages.findLast((message) => message.role === "user");
    if (!last) return;
    event.preventDefault();
    views.get(last).edit();
  }
}

function onSubmit(event) {
  event.preventDefault();
  const text = byId("input").value.trim();
  if (running.has(current.id)) stop(current.id);
  else if (text) {
    byId("input").value = "";
    onInput();
    send(text);
  }
}

function onInput() {
  fitHeight(byId("input"));
  remember("sessionStorage", DRAFT_ENTRY, byId("input").value);
}

/** Another tab changed the storage. */
function onStorage({ key }) {
  if (!key?.startsWith(PREFIX)) return;
  const id = key.slice(PREFIX.length);
  if (running.has(id)) return; // the answer that is streamed here is newer
  const changed = store.refresh(id);
  if (id === current.id && changed) open(changed);
  else drawList();
}

function onScroll() {
  const log = byId("log");
  followsEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  byId("jump").hidden = followsEnd;
}

function listen() {
  const clicks = {
    "new-chat": startNew, "open-sidebar": () => showSidebar(true), "close-sidebar": () => showSidebar(false),
    backdrop: () => showSidebar(false), "open-settings": openSettings, "show-keys": () => showDialog(byId("keys")),
    "export-all": () => download("chats.json", JSON.stringify(store.list().map(exported), null, 2)),
    jump: () => byId("log").scrollTo({ top: byId("log").scrollHeight, behavior: "smooth" }),
  };
  for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);
  byId("composer").addEventListener("submit", onSubmit);
  byId("input").addEventListener("keydown", onInputKey);
  byId("input").addEventListener("input", onInput);
  byId("log").addEventListener("scroll", onScroll, { passive: true });
  new ResizeObserver(() => scrollToEnd()).observe(byId("log")); // a keyboard opens, or the field grows
  document.addEventListener("keydown", onKey);
  window.addEventListener("storage", onStorage);
  window.addEventListener("beforeunload", () => (leaving = true));
  for (const kind of ["pageshow", "pointerdown", "keydown"]) { // it has stayed, or come back
    window.addEventListener(kind, () => (leaving = false), true);
  }
  window.addEventListener("pagehide", () => {
    for (const id of running.keys()) if (store.all.has(id)) store.save(store.all.get(id));
  });
}

const openSettings = setUpSettings(() => current, (settings) => {
  Object.assign(current, settings);
  if (current.messages.length) store.save(current);
});
setUpDialogs();
setUpTheme();
listen();
const last = store.all.get(recall("sessionStorage", CURRENT_ENTRY));
if (last) open(last);
else startNew();
byId("input").value = recall("sessionStorage", DRAFT_ENTRY) ?? "";
fitHeight(byId("input"));
greet();

// Messages as DOM nodes: text, actions, figures, errors, and editing in place.

class MessageView {
  #markdown = null;
  #thought = null;
  #handlers;
  #body = make("div", { class: "body" });
  #below = make("div", { class: "below" });

  /** `handlers` has regenerate(message) and edit(message, text). */
  constructor(message, handlers) {
    this.message = message;
    this.#handlers = handlers;
    const name = message.role === "user" ? "You" : "Answer";
    this.root = make("article", { class: `message ${message.role}`, "aria-label": name }, this.#body, this.#below);
    if (message.role === "assistant") {
      this.#markdown = new MarkdownView(this.#body);
      this.#body.classList.add("markdown");
    }
    this.update();
  }

  /** Show the text that has arrived, and the actions once the answer has ended. */
  update() {
    const { message } = this;
    const streaming = message.state === "streaming";
    if (this.#markdown) this.#showAnswer(streaming);
    else this.#body.textContent = message.text;
    this.root.classList.toggle("streaming", streaming);
    this.root.setAttribute("aria-busy", String(streaming));
    if (!streaming) this.#below.replaceChildren(...this.#makeBelow());
  }

  #showAnswer(streaming) {
    const { thought, answer, open } = splitThought(this.message.text);
    if (thought && !this.#thought) {
      this.#thought = { summary: make("summary"), text: make("p") };
      this.#body.before(make("details", { class: "thought" }, this.#thought.summary, this.#thought.text));
    }
    if (thought) {
      this.#thought.summary.textContent = open && streaming ? "Thinking" : "Thoughts";
      this.#thought.text.textContent = thought;
    }
    this.#markdown.show(answer);
    this.root.classList.toggle("empty", !answer);
  }

  #makeBelow() {
    const { message } = this;
    const parts = [];
    if (message.error) {
      const again = textButton("Retry", "plain", () => this.#handlers.regenerate(message));
      parts.push(make("p", { class: "error", role: "alert" }, make("span", {}, message.error), again));
    }
    const actions = make("div", { class: "actions", role: "group", "aria-label": "Actions" });
    if (message.text) {
      const copy = iconButton("copy", "Copy", () => copyFrom(copy, message.text));
      actions.append(copy);
    }
    if (message.role === "assistant" && !message.error) {
      actions.append(iconButton("again", "Regenerate", () => this.#handlers.regenerate(message)));
    }
    if (message.text) actions.append(iconButton("edit", "Edit", () => this.edit()));
    if (message.role === "assistant") actions.append(make("span", { class: "stats" }, describeAnswer(message)));
    parts.push(actions);
    return parts;
  }

  /** Replace the text by a field. A changed question is sent again; a changed answer is only kept. */
  edit() {
    const { message } = this;
    const field = make("textarea", { "aria-label": "Edit the message", class: "editor" });
    field.value = message.text;
    const end = () => {
      form.replaceWith(this.#body);
      this.#below.hidden = false;
    };
    const save = () => {
      const text = field.value.trim();
      end();
      if (text && text !== message.text) this.#handlers.edit(message, text);
    };
    const form = make("form", { class: "edit" }, field,
      make("div", { class: "row" }, textButton("Cancel", "plain", end),
        make("button", { type: "submit", class: "main" }, message.role === "user" ? "Send" : "Save")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      else if (isSendKey(event)) save();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    field.addEventListener("input", () => fitHeight(field));
    this.#body.replaceWith(form);
    this.#below.hidden = true;
    fitHeight(field);
    field.focus();
  }
}

/** Split "<think>...</think>" from the beginning of an answer. `open` says that it has not ended. */
function splitThought(text) {
  const found = /^\s*<think>([^]*?)(<\/think>|$)/.exec(text);
  if (!found) return { thought: "", answer: text, open: false };
  return { thought: found[1].trim(), answer: text.slice(found[0].length).trimStart(), open: !found[2] };
}

function describeAnswer({ stats, state, finish, error }) {
  const parts = [];
  if (stats) {
    const about = stats.counted ? "" : "about ";
    parts.push(`${about}${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`);
    if (stats.tokens_per_s !== null) parts.push(`${stats.tokens_per_s} tokens/s`);
    parts.push(`first token after ${stats.first_token_ms < 1000 ? `${stats.first_token_ms} ms`
      : `${(stats.first_token_ms / 1000).toFixed(1)} s`}`);
  }
  if (state === "stopped" && !error) parts.push("stopped");
  if (finish === "length") parts.push("ended at the limit of tokens");
  return parts.join(" · ");
}

/** Enter sends, unless it ends a composition of an input method or a touch keyboard shows it as a new line. */
function isSendKey(event) {
  const sends = !isTouch() || event.ctrlKey || event.metaKey;
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && sends;
}

function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

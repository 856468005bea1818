// Conversations in localStorage, one entry each, so that two tabs do not overwrite each other's. If the browser cannot
// store (quota, a private window, storage switched off) they stay in memory and `onTrouble` gets the reason.

const PREFIX = "yalis.chat.";
const forgotten = new Map(); // small entries that the browser does not store

/** Return a small entry of "localStorage" or "sessionStorage", or null. */
function recall(storage, entry) {
  try {
    return forgotten.get(entry) ?? window[storage].getItem(entry);
  } catch {
    return null;
  }
}

function remember(storage, entry, value) {
  try {
    window[storage].setItem(entry, value);
    forgotten.delete(entry);
  } catch {
    forgotten.set(entry, value);
  }
}

class ConversationStore {
  #storage = null;
  #unsaved = new Set();
  #onTrouble;
  all = new Map(); // id -> conversation

  constructor(onTrouble) {
    this.#onTrouble = onTrouble;
    try {
      this.#storage = window.localStorage;
      for (const key of Object.keys(this.#storage)) if (key.startsWith(PREFIX)) this.refresh(key.slice(PREFIX.length));
    } catch {
      this.#storage = null;
    }
  }

  /** The conversations, the last one used first. */
  list() {
    return [...this.all.values()].sort((one, other) => other.updated - one.updated);
  }

  /** Read a conversation again, which another tab may have changed. Entries that are not ours are left alone. */
  refresh(id) {
    const text = this.#storage?.getItem(PREFIX + id);
    const read = text ? readConversation(text, id) : null;
    if (read) this.all.set(id, read);
    else if (!text) this.all.delete(id);
    return read;
  }

  save(conversation) {
    this.all.set(conversation.id, conversation);
    this.#unsaved.add(conversation.id);
    this.#write();
  }

  remove(id) {
    this.all.delete(id);
    this.#unsaved.delete(id);
    this.#storage?.removeItem(PREFIX + id);
    this.#write();
  }

  #write() {
    for (const id of this.#unsaved) {
      try {
        this.#storage.setItem(PREFIX + id, JSON.stringify(this.all.get(id)));
        this.#unsaved.delete(id);
      } catch {
        continue; // reported below; a smaller one may still fit
      }
    }
    const titles = [...this.#unsaved].map((id) => `“${this.all.get(id).title}”`).join(", ");
    const reason = this.#storage ? "The browser's storage is full" : "The browser does not let this page store data";
    const advice = this.#storage ? "Export it or delete other chats." : "Export it to keep it.";
    this.#onTrouble(titles && `${reason}: ${titles} will be lost when this page is closed. ${advice}`);
  }
}

function newConversation(settings) {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID() needs TLS or localhost
  const id = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const now = Date.now();
  const start = { version: 1, id, title: "New chat", created: now, updated: now };
  return { ...start, system: "", sampling: {}, ...settings, messages: [] };
}

/** Return the conversation in `text`, or null if it is not one. */
function readConversation(text, id) {
  try {
    const read = JSON.parse(text);
    const roles = ["user", "assistant"];
    const texts = [read.title, read.system, ...read.messages.map((one) => one.text)];
    const times = [read.created, read.updated];
    const valid = texts.every((text) => typeof text === "string") && times.every(Number.isFinite)
      && read.messages.every((one) => roles.includes(one.role)) && typeof read.sampling === "object";
    if (!valid || read.version !== 1 || read.id !== id) return null;
    // An answer that was being streamed when the page was closed has ended.
    for (const one of read.messages) if (one.state === "streaming") one.state = "stopped";
    return read;
  } catch {
    return null;
  }
}

/** What other programs expect of an export: the messages as the API takes them, and the settings. */
function exported(conversation) {
  const { title, created, updated, system, sampling, messages } = conversation;
  const first = system ? [{ role: "system", content: system }] : [];
  const rest = messages.map(({ role, text, ...details }) => ({ role, content: text, ...details }));
  const times = { created: new Date(created).toISOString(), updated: new Date(updated).toISOString() };
  return { title, ...times, sampling, messages: [...first, ...rest] };
}

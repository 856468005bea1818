// The server's API: the model's name and streamed answers. Every failure is an ApiFailure with one sentence.

const KEY_ENTRY = "yalis.key";
const NOT_REACHED = "The server cannot be reached. Check that it is running.";

class ApiFailure extends Error {
  /** `status` is 0 if there was no answer; `retryAfter` is in seconds, or null. */
  constructor(sentence, status = 0, retryAfter = null) {
    super(sentence);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function apiHeaders() {
  const key = recall("sessionStorage", KEY_ENTRY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function callApi(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: apiHeaders(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(NOT_REACHED);
  }
  if (!response.ok) throw await readFailure(response);
  return response;
}

async function readFailure(response) {
  let message = "";
  try {
    message = String((await response.json()).error.message ?? "");
  } catch {
    // not the API's error format: an error of a proxy, perhaps
  }
  const seconds = parseFloat(response.headers.get("Retry-After"));
  const retryAfter = Number.isFinite(seconds) ? seconds : null;
  return new ApiFailure(sentenceFor(response.status, message), response.status, retryAfter);
}

function sentenceFor(status, message) {
  if (status === 429) return "The server is busy.";
  if (status === 401) return "The server asks for an API key.";
  if (message) return asSentence(message);
  if (status === 503) return "The server is not accepting requests now.";
  return `The server answered with status ${status}.`;
}

/** The server's messages begin in lower case; one that begins with the name of a field keeps it. */
function asSentence(message) {
  const field = /^\w*[_.]\w/.test(message);
  return `${field ? message[0] : message[0].toUpperCase()}${message.slice(1)}${message.endsWith(".") ? "" : "."}`;
}

/** Return the name of the model that the server runs. */
async function fetchModel() {
  const models = await (await callApi("v1/models")).json();
  return models.data[0].id;
}

function requestBody(model, conversation, messages) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const history = messages.filter((message) => message.text).map(({ role, text }) => ({ role, content: text }));
  return {
    ...conversation.sampling, model, messages: [...system, ...history],
    stream: true, stream_options: { include_usage: true },
  };
}

/** Yield {text}, {finish} and {usage} of an answer as they arrive. */
async function* streamAnswer(body, signal) {
  const response = await callApi("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const stream = response.body.getReader();
  const reader = new EventReader();
  let done = false;
  try {
    while (!done) {
      const part = await readPart(stream);
      if (part.done) break;
      for (const event of reader.feed(part.value)) {
        done ||= event.data === "[DONE]";
        if (!done) yield* readChunk(event.data);
      }
    }
  } finally {
    stream.cancel().catch(() => {}); // a stream that was aborted cannot be cancelled again
  }
  if (!done) throw new ApiFailure("The connection was lost before the end of the answer.");
}

async function readPart(stream) {
  try {
    return await stream.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The connection was lost before the end of the answer.");
  }
}

function* readChunk(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiFailure("The server sent something that is not a part of an answer.");
  }
  if (chunk.error) throw new ApiFailure(sentenceFor(chunk.error.code, chunk.error.message));
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) yield { text: choice.delta.content };
  if (choice?.finish_reason) yield { finish: choice.finish_reason };
  if (chunk.usage) yield { usage: chunk.usage };
}

/** Measures an answer: time to first token in ms, and tokens per second after it. */
class AnswerClock {
  #started = performance.now();
  #first = null;
  #last = null;
  #parts = 0;

  tick() {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#parts++;
  }

  /** `usage` is missing if the answer was cut short: its tokens are then about as many as its parts. */
  stats(usage) {
    if (this.#first === null) return null;
    const tokens = usage?.completion_tokens ?? this.#parts;
    const seconds = (this.#last - this.#first) / 1000;
    return {
      tokens, counted: Boolean(usage), prompt_tokens: usage?.prompt_tokens ?? null,
      first_token_ms: Math.round(this.#first - this.#started),
      tokens_per_s: tokens > 1 && seconds > 0 ? Math.round((10 * (tokens - 1)) / seconds) / 10 : null,
    };
  }
}

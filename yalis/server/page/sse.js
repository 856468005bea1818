// Server-sent events from bytes that arrive cut anywhere, also inside a UTF-8 sequence or between CR and LF.

class EventReader {
  #decoder = new TextDecoder();
  #buffer = "";
  #scanned = 0; // no line ends in the buffer before this offset
  #afterReturn = false; // the last character was CR: a LF that follows belongs to it
  #data = [];
  #type = "";

  /** Return the events that these bytes complete, each with its type and its data. */
  feed(bytes) {
    let text = this.#decoder.decode(bytes, { stream: true });
    if (this.#afterReturn && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#afterReturn = false;
    }
    this.#buffer += text;
    const events = [];
    const ends = /\r\n|\n|\r/g;
    let start = 0;
    ends.lastIndex = this.#scanned;
    for (let end = ends.exec(this.#buffer); end; end = ends.exec(this.#buffer)) {
      this.#takeLine(this.#buffer.slice(start, end.index), events);
      start = ends.lastIndex;
      this.#afterReturn = end[0] === "\r" && start === this.#buffer.length;
    }
    this.#buffer = this.#buffer.slice(start);
    this.#scanned = this.#buffer.length;
    return events;
  }

  #takeLine(line, events) {
    if (!line) {
      if (this.#data.length) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#type = "";
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
  }
}

// Inline Markdown as DOM nodes. All text of the model reaches the page as text nodes, and the only attributes made from
// it are the href and title of http(s) links. An image becomes a link: nothing is loaded.

const MAX_INLINE_DEPTH = 16;
const MAX_URL = 2048;
const PLAIN = /[^\\`*_~[\]!<\nhH$]+/y;
const BARE_URL = new RegExp(`https?://[^\\s<>"\`|\\\\^]{1,${MAX_URL}}`, "iy");
const ANGLE_URL = new RegExp(`<(https?://[^\\s<>]{1,${MAX_URL}})>`, "iy");
const LINE_BREAK_TAG = /<br ?\/?>/iy;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** Return the normalized URL if it is http or https, else null. */
function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
}

function makeLink(url) {
  return make("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer" });
}

/** Append the nodes of a paragraph's text to `parent`. */
function renderInline(parent, text) {
  new InlineParser(parent, text).run();
}

class InlineParser {
  #parent;
  #text;
  #at = 0;
  #plain = ""; // text that is not in a node yet
  #brackets = []; // "[" that may begin a link
  #lastRun = null; // the last of the linked delimiter runs
  #noCloser = new Map(); // length of a backtick run -> there is no such run from here on
  #depths = new WeakMap(); // element -> how deep emphasis is nested inside it

  constructor(parent, text) {
    this.#parent = parent;
    this.#text = text;
  }

  run() {
    const text = this.#text;
    while (this.#at < text.length) {
      PLAIN.lastIndex = this.#at;
      const plain = PLAIN.exec(text);
      if (plain) {
        this.#plain += plain[0];
        this.#at = PLAIN.lastIndex;
      } else if (!this.#readSpecial(text[this.#at])) {
        this.#plain += text[this.#at++];
      }
    }
    this.#flush();
    this.#pairRuns(null);
  }

  #readSpecial(character) {
    switch (character) {
      case "\\": return this.#readBackslash();
      case "$": return this.#readMath("$$", "$$");
      case "`": return this.#readCode();
      case "*": case "_": case "~": return this.#readRun(character);
      case "[": return this.#openBracket(1);
      case "!": return this.#text[this.#at + 1] === "[" && this.#openBracket(2);
      case "]": return this.#closeBracket();
      case "<": return this.#readAngle();
      case "\n": return this.#readNewline();
      default: return this.#readBareUrl();
    }
  }

  #flush() {
    if (this.#plain) this.#parent.append(this.#plain);
    this.#plain = "";
  }

  #append(node) {
    this.#flush();
    this.#parent.append(node);
    return node;
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    return pattern.exec(this.#text);
  }

  #readBackslash() {
    const next = this.#text[this.#at + 1];
    if (next === "\n") {
      this.#at += 1; // the newline breaks the line
      return true;
    }
    if (next === "(" && this.#readMath("\\(", "\\)")) return true;
    if (next === "[" && this.#readMath("\\[", "\\]")) return true;
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    this.#plain += next;
    this.#at += 2;
    return true;
  }

  /** TeX is shown as it is, so that its underscores and backslashes are not taken for Markdown. */
  #readMath(open, close) {
    if (!this.#text.startsWith(open, this.#at) || this.#noCloser.get(close) <= this.#at) return false;
    const end = this.#text.indexOf(close, this.#at + 2);
    if (end < 0) {
      this.#noCloser.set(close, this.#at);
      return false;
    }
    this.#append(make("code", { class: "math" }, this.#text.slice(this.#at, end + 2)));
    this.#at = end + 2;
    return true;
  }

  #readCode() {
    const text = this.#text;
    let end = this.#at;
    while (text[end] === "`") end++;
    const length = end - this.#at;
    let close = this.#noCloser.get(length) <= this.#at ? -1 : end;
    while (close >= 0) {
      close = text.indexOf("`", close);
      if (close < 0) break;
      let after = close;
      while (text[after] === "`") after++;
      if (after - close === length) break;
      close = after;
    }
    if (close < 0) {
      if (!this.#noCloser.has(length)) this.#noCloser.set(length, this.#at);
      this.#plain += text.slice(this.#at, end);
      this.#at = end;
      return true;
    }
    let code = text.slice(end, close).replaceAll("\n", " ");
    if (code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.#append(make("code", {}, code));
    this.#at = close + length;
    return true;
  }

  #readNewline() {
    this.#plain = this.#plain.replace(/ {1,8}$/, "");
    this.#append(make("br"));
    this.#at++;
    while (this.#text[this.#at] === " ") this.#at++;
    return true;
  }

  #readAngle() {
    if (this.#match(LINE_BREAK_TAG)) {
      this.#append(make("br"));
      this.#at = LINE_BREAK_TAG.lastIndex;
      return true;
    }
    const found = this.#match(ANGLE_URL);
    const url = found && safeUrl(found[1]);
    if (!url) return false;
    this.#append(makeLink(url)).append(found[1]);
    this.#at = ANGLE_URL.lastIndex;
    return true;
  }

  #readBareUrl() {
    if (/\w/.test(this.#text[this.#at - 1] ?? "")) return false;
    let shown = this.#match(BARE_URL)?.[0];
    if (!shown) return false;
    shown = trimUrl(shown);
    const url = safeUrl(shown);
    if (!url) return false;
    this.#append(makeLink(url)).append(shown);
    this.#at += shown.length;
    return true;
  }

  // Links: a bracket remembers its text node, and what follows it moves into the link when the link is complete.

  #openBracket(length) {
    const node = this.#append(document.createTextNode(this.#text.slice(this.#at, this.#at + length)));
    this.#brackets.push({ node, runBefore: this.#lastRun });
    this.#at += length;
    return true;
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const target = bracket && this.#readTarget(this.#at + 1);
    if (!target) return false;
    this.#flush();
    this.#pairRuns(bracket.runBefore);
    const link = makeLink(target.url);
    while (bracket.node.nextSibling) link.append(bracket.node.nextSibling);
    for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    if (!link.textContent.trim()) link.replaceChildren(target.url);
    bracket.node.replaceWith(link);
    this.#brackets = []; // no link inside a link
    this.#at = target.end;
    return true;
  }

  /** Return the URL in "(url)" or '(url "title")' and where it ends, or null if it is no http(s) link. */
  #readTarget(at) {
    const text = this.#text;
    if (text[at] !== "(") return null;
    const limit = Math.min(text.length, at + MAX_URL);
    let from = at + 1;
    let depth = 0;
    while (from < limit && text[from] === " ") from++;
    const angled = text[from] === "<";
    if (angled) from++;
    let end = from;
    for (; end < limit; end++) {
      const character = text[end];
      if (character === "\n" || (angled ? character === ">" : character === " ")) break;
      if (!angled && character === "(") depth++;
      if (!angled && character === ")" && --depth < 0) break;
    }
    const url = safeUrl(text.slice(from, end));
    if (!url) return null;
    if (angled && text[end++] !== ">") return null;
    const title = /[ \n]{0,8}(?:"[^"]{0,200}"|'[^']{0,200}')?[ \n]{0,8}\)/y;
    title.lastIndex = end;
    return title.test(text) ? { url, end: title.lastIndex } : null;
  }

  // Emphasis: runs of * _ ~~ are text nodes first. Pairs are found afterwards, as CommonMark describes.

  #readRun(character) {
    const text = this.#text;
    const start = this.#at;
    while (text[this.#at] === character) this.#at++;
    const length = this.#at - start;
    const run = text.slice(start, this.#at);
    if (character === "~" && length !== 2) {
      this.#plain += run;
      return true;
    }
    const before = codePointBefore(text, start);
    const after = this.#at < text.length ? String.fromCodePoint(text.codePointAt(this.#at)) : " ";
    const [spaceBefore, spaceAfter] = [!before.trim(), !after.trim()];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const inWord = character === "_";
    const entry = {
      node: this.#append(document.createTextNode(run)), character, left: length, length,
      opens: left && (!inWord || !right || markBefore), closes: right && (!inWord || !left || markAfter),
      previous: this.#lastRun, next: null,
    };
    if (this.#lastRun) this.#lastRun.next = entry;
    this.#lastRun = entry;
    return true;
  }

  #pairRuns(bottom) {
    if (this.#lastRun === bottom) return;
    const searched = new Map(); // kind of closer -> no opener is found before this run
    let closer = this.#lastRun;
    while (closer && closer.previous !== bottom) closer = closer.previous;
    while (closer) {
      const kind = `${closer.character}${closer.opens}${closer.length % 3}`;
      const opener = closer.closes ? findOpener(closer, bottom, searched.get(kind)) : null;
      const size = opener && Math.min(2, opener.left, closer.left);
      if (opener && this.#wrap(opener, closer, size)) {
        opener.next = closer;
        closer.previous = opener;
        if (!shorten(opener, size)) this.#unlink(opener);
        if (!shorten(closer, size)) {
          const next = closer.next;
          this.#unlink(closer);
          closer = next;
        }
      } else {
        if (closer.closes) searched.set(kind, closer.previous);
        const next = closer.next;
        if (!closer.opens) this.#unlink(closer);
        closer = next;
      }
    }
    this.#lastRun = bottom;
    if (bottom) bottom.next = null;
  }

  #wrap(opener, closer, size) {
    let depth = 0;
    for (let node = opener.node.nextSibling; node !== closer.node; node = node.nextSibling) {
      depth = Math.max(depth, this.#depths.get(node) ?? 0);
    }
    if (depth >= MAX_INLINE_DEPTH) return false;
    const element = make(closer.character === "~" ? "del" : size === 2 ? "strong" : "em");
    while (opener.node.nextSibling !== closer.node) element.append(opener.node.nextSibling);
    opener.node.after(element);
    this.#depths.set(element, depth + 1);
    return true;
  }

  #unlink(run) {
    if (run.previous) run.previous.next = run.next;
    if (run.next) run.next.previous = run.previous;
    else if (this.#lastRun === run) this.#lastRun = run.previous;
  }
}

/** Punctuation after a URL belongs to the sentence, and so does a bracket that the URL does not open. */
function trimUrl(url) {
  const openers = { ")": "(", "]": "[", "}": "{" };
  const surplus = {};
  for (const closer in openers) surplus[closer] = url.split(closer).length - url.split(openers[closer]).length;
  let end = url.length;
  for (; end > 0; end--) {
    const last = url[end - 1];
    if (last in openers ? surplus[last]-- <= 0 : !".,;:!?*_~'".includes(last)) break;
  }
  return url.slice(0, end);
}

function codePointBefore(text, at) {
  if (at === 0) return " ";
  const low = at > 1 && text.charCodeAt(at - 1) >= 0xdc00 && text.charCodeAt(at - 1) <= 0xdfff;
  return text.slice(low ? at - 2 : at - 1, at);
}

function findOpener(closer, bottom, searched) {
  for (let run = closer.previous; run && run !== bottom && run !== searched; run = run.previous) {
    if (run.character !== closer.character || !run.opens) continue;
    const odd = (run.closes || closer.opens) && (run.length + closer.length) % 3 === 0;
    if (!odd || (run.length % 3 === 0 && closer.length % 3 === 0)) return run;
  }
  return null;
}

/** Take `size` characters off a run. Returns whether some are left. */
function shorten(run, size) {
  run.left -= size;
  if (run.left) run.node.data = run.character.repeat(run.left);
  else run.node.remove();
  return run.left > 0;
}

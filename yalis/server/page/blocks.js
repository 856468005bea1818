// Blocks of Markdown as DOM nodes: the part of CommonMark and of its tables that models write. HTML, setext headings,
// indented code and link definitions are plain text.

const MAX_BLOCK_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const HEADING = /^ {0,3}(#{1,6})(?= |\t|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const TASK = /^\[([ xX])\] /;

/** Shows Markdown in `root`. Blocks that did not change since the last text keep their nodes. */
class MarkdownView {
  #root;
  #sources = [];

  constructor(root) {
    this.#root = root;
  }

  show(text) {
    const blocks = parseBlocks(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.#sources[same]) same++;
    while (this.#root.childNodes.length > same) this.#root.lastChild.remove();
    for (const block of blocks.slice(same)) this.#root.append(renderBlock(block));
    this.#sources = blocks.map((block) => block.source);
  }
}

/** Return the blocks of some lines; `depth` is the number of lists and quotes around them. */
function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const nested = depth < MAX_BLOCK_DEPTH;
    const block = readFence(lines, at) ?? readHeading(lines, at) ?? readRule(lines, at) ?? readTable(lines, at)
      ?? (nested ? readQuote(lines, at, depth) ?? readList(lines, at, depth) : null) ?? readParagraph(lines, at);
    block.source = `${block.kind} ${lines.slice(at, block.end).join("\n")}`;
    at = block.end;
    blocks.push(block);
  }
  return blocks;
}

function readFence(lines, at) {
  const open = fenceOf(lines[at]);
  if (!open) return null;
  const indent = lines[at].search(/\S/);
  const code = [];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const close = FENCE.exec(lines[end]);
    if (close && !close[2].trim() && close[1][0] === open.mark[0] && close[1].length >= open.mark.length) break;
    code.push(dedent(lines[end], indent));
  }
  return { kind: "code", language: open.language, code: code.join("\n"), end: Math.min(end + 1, lines.length) };
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found || (found[1][0] === "`" && found[2].includes("`"))) return null;
  return { mark: found[1], language: found[2].trim().split(/[\s{,]/)[0] };
}

function dedent(line, width) {
  const indent = line.search(/[^ ]/);
  return line.slice(indent < 0 ? Math.min(width, line.length) : Math.min(width, indent));
}

function readHeading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim().replace(/(?:^| )#+$/, "").trim();
  return { kind: "heading", level: found[1].length, text, end: at + 1 };
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function readQuote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inner = [];
  let end = at;
  for (; end < lines.length; end++) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
    else if (inner.at(-1).trim() && !startsBlock(lines, end)) inner.push(lines[end]);
    else break;
  }
  return { kind: "quote", blocks: parseBlocks(inner, depth + 1), end };
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const marker = RULE.test(lines[end]) ? null : ITEM.exec(lines[end]);
    if (!marker || /\d/.test(marker[2]) !== ordered) break;
    const item = readItem(lines, end, marker);
    items.push(parseBlocks(item.lines, depth + 1));
    end = item.end;
    while (end < lines.length && !lines[end].trim()) end++;
    const more = end < lines.length && ITEM.exec(lines[end]);
    loose ||= item.loose || (end > item.end && Boolean(more) && /\d/.test(more[2]) === ordered);
    if (!more) end = item.end;
  }
  return { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items, loose, end };
}

/** Return the lines of one item without its indentation. Models often indent less than the text of the item. */
function readItem(lines, at, marker) {
  const [, indent, mark, gap, rest] = marker;
  const width = indent.length + mark.length + (gap.length > 4 ? 1 : Math.max(gap.length, 1));
  const found = [gap.length > 4 ? gap.slice(1) + rest : rest];
  const least = Math.min(indent.length + 2, width);
  let end = at + 1;
  let loose = false;
  let fenced = Boolean(fenceOf(found[0]));
  for (let blanks = 0; end + blanks < lines.length;) {
    const line = lines[end + blanks];
    if (!line.trim()) {
      blanks++;
      continue;
    }
    const inside = line.search(/\S/) >= least;
    if (!inside && (blanks || fenced || ITEM.test(line) || startsBlock(lines, end))) break;
    if (blanks && !fenced) loose = true;
    found.push(...Array(blanks).fill(""), inside ? dedent(line, width) : line.trimStart());
    if (inside && fenceOf(dedent(line, width))) fenced = !fenced;
    end += blanks + 1;
    blanks = 0;
  }
  return { lines: found, end, loose };
}

function readTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const marks = splitRow(lines[at + 1]);
  const heads = splitRow(lines[at]);
  if (marks.length !== heads.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  if (!lines[at + 1].includes("|") && heads.length < 2) return null;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && !startsOther(lines, end); end++) {
    const cells = splitRow(lines[end]);
    rows.push(heads.map((_, column) => cells[column] ?? ""));
  }
  return { kind: "table", heads, align, rows, end };
}

/** Split a row at the "|" that are not escaped. */
function splitRow(line) {
  const cells = [];
  let cell = "";
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at++;
    } else if (text[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else cell += text[at];
  }
  if (cell.trim() || !text.endsWith("|")) cells.push(cell.trim());
  return cells;
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return { kind: "paragraph", text, end };
}

/** Whether a block other than a paragraph starts here, so that a paragraph ends before it. */
function startsBlock(lines, at) {
  return startsOther(lines, at) || readTable(lines, at) !== null;
}

function startsOther(lines, at) {
  const line = lines[at];
  if (fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  // Only "1." interrupts a paragraph: a line may begin with another number by chance.
  return Boolean(item && item[4].trim() && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1));
}

function renderBlock(block) {
  switch (block.kind) {
    case "code": return renderCode(block);
    case "heading": return renderText(`h${Math.min(block.level + 2, 6)}`, block.text, `level-${block.level}`);
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, ...block.blocks.map(renderBlock));
    case "list": return renderList(block);
    case "table": return renderTable(block);
    default: return renderText("p", block.text);
  }
}

function renderText(tag, text, name) {
  const element = make(tag, name ? { class: name } : {});
  renderInline(element, text);
  return element;
}

function renderCode({ language, code }) {
  const attributes = { type: "button", class: "copy-code", "aria-label": "Copy code" };
  const button = make("button", attributes, icon("copy"), "Copy");
  button.addEventListener("click", () => copyFrom(button, code));
  const body = make("code");
  highlight(body, code, language);
  const scrolled = make("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, body);
  const head = make("div", { class: "code-head" }, make("span", {}, language), button);
  return make("div", { class: "code" }, head, scrolled);
}

function renderList({ ordered, start, items, loose }) {
  const list = make(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  for (const blocks of items) list.append(renderItem(blocks, loose));
  return list;
}

function renderItem(blocks, loose) {
  const item = make("li");
  const [first] = blocks;
  const task = first?.kind === "paragraph" && TASK.exec(first.text);
  if (task) {
    const done = task[1] !== " ";
    item.className = "task";
    item.append(make("input", { type: "checkbox", disabled: "", "aria-label": done ? "done" : "open" }));
    item.firstChild.checked = done;
    first.text = first.text.slice(task[0].length);
  }
  for (const block of blocks) {
    if (block.kind === "paragraph" && !loose) renderInline(item, block.text);
    else item.append(renderBlock(block));
  }
  return item;
}

function renderTable({ heads, align, rows }) {
  const cells = (tag, texts) => make("tr", {}, ...texts.map((text, at) => renderText(tag, text, align[at])));
  const table = make("table", {}, make("thead", {}, cells("th", heads)));
  table.append(make("tbody", {}, ...rows.map((row) => cells("td", row))));
  return make("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

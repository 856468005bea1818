// Colours for code of any language: comments, strings, numbers and common keywords. It only adds spans around text.

const KEYWORDS = new Set(
  ("abstract and as assert async await begin bool break case catch char class const continue def default defer del do"
  + " done double elif else end enum esac except export extends extern false fi final finally float fn for foreach from"
  + " func function global go if impl implements import in include int interface is lambda let local long loop match"
  + " mod module mut namespace new nil none None not null of or package pass private protected pub public raise return"
  + " select self short signed sizeof static struct super switch then this throw trait true True False try type typedef"
  + " union unsigned until use using var virtual void volatile where while with yield SELECT FROM WHERE INSERT INTO"
  + " VALUES UPDATE SET DELETE JOIN LEFT INNER ON GROUP BY ORDER CREATE TABLE AND OR NOT NULL AS LIMIT").split(" "),
);
const HASH_COMMENTS = /^(?:py|python|sh|bash|zsh|shell|console|rb|ruby|perl|r|ya?ml|toml|makefile|dockerfile)$/i;
const DASH_COMMENTS = /^(?:sql|lua|haskell|hs|ada)$/i;
const NO_COLOURS = /^(?:|text|txt|plain|plaintext|output|markdown|md|html|xml|diff|log)$/i;
const MAX_COLOURED = 50000;

function tokenPattern(language) {
  const comment = HASH_COMMENTS.test(language) ? "#[^\\n]*"
    : DASH_COMMENTS.test(language) ? "--[^\\n]*" : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  const text = '"""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?|`(?:[^`\\\\]|\\\\.)*`?';
  return new RegExp(`(${comment})|(${text})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
}

/** Append `code` to `parent`. */
function highlight(parent, code, language) {
  if (NO_COLOURS.test(language) || code.length > MAX_COLOURED) {
    parent.append(code);
    return;
  }
  let shown = 0;
  for (const found of code.matchAll(tokenPattern(language))) {
    const [all, comment, text, number, word] = found;
    const kind = comment ? "comment" : text ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : "";
    if (!kind) continue;
    parent.append(code.slice(shown, found.index), make("span", { class: kind }, all));
    shown = found.index + all.length;
  }
  parent.append(code.slice(shown));
}

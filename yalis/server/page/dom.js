// Small helpers to build DOM nodes. Strings become text nodes or attributes, never HTML.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

function iconButton(name, label, act) {
  const button = make("button", { type: "button", class: "icon", "aria-label": label, title: label }, icon(name));
  button.addEventListener("click", act);
  return button;
}

function textButton(label, kind, act) {
  const button = make("button", { type: "button", class: kind }, label);
  button.addEventListener("click", act);
  return button;
}

const byId = (id) => document.getElementById(id);

/** Whether a keyboard would cover half of the screen. */
const isTouch = () => matchMedia("(hover: none) and (pointer: coarse)").matches;

/** Copy text. Pages served without TLS to another host have no clipboard API, so a selection is copied there. */
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed in this context; the selection below may still be copied
    }
  }
  const before = document.activeElement;
  const field = make("textarea", { class: "unseen", readonly: "" });
  field.value = text;
  // A modal dialog makes everything outside of it inert.
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}

/** Copy text and show a check mark on the button for a moment. */
async function copyFrom(button, text) {
  const copied = await copyText(text);
  announce(copied ? "Copied." : "The browser did not allow copying.");
  if (!copied) return;
  const use = button.querySelector("use");
  use.setAttribute("href", "#i-check");
  setTimeout(() => use.setAttribute("href", "#i-copy"), 1500);
}

/** Say something to screen readers. */
function announce(sentence) {
  byId("status").textContent = sentence;
}

function download(name, content) {
  const url = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

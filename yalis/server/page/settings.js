// The dialogs: settings of a chat, API key and shortcuts; and the theme.

const DEFAULTS_ENTRY = "yalis.defaults";
const THEME_ENTRY = "yalis.theme";
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

function settingsForNewChats() {
  try {
    const { system, sampling } = JSON.parse(recall("localStorage", DEFAULTS_ENTRY));
    return { system: String(system ?? ""), sampling: { ...sampling } };
  } catch {
    return { system: "", sampling: {} };
  }
}

/** Let the form show the settings that `current()` returns. `changed(settings)` is called on every valid change. */
function setUpSettings(current, changed) {
  const dialog = byId("settings");
  const form = byId("settings-form");
  const fill = ({ system, sampling }) => {
    for (const field of namedFields(form)) field.value = sampling[field.name] ?? "";
    form.elements.system.value = system;
    form.elements.stop.value = (sampling.stop ?? []).join("\n");
  };
  form.addEventListener("input", () => changed(readSettings(form)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
  byId("reset-settings").addEventListener("click", () => {
    fill({ system: "", sampling: {} });
    changed(readSettings(form));
  });
  byId("keep-settings").addEventListener("click", () => {
    remember("localStorage", DEFAULTS_ENTRY, JSON.stringify(readSettings(form)));
    announce("New chats will have these settings.");
    byId("keep-settings").textContent = "Kept";
    setTimeout(() => (byId("keep-settings").textContent = "Use for new chats"), 1500);
  });
  return () => {
    fill(current());
    showDialog(dialog);
  };
}

const namedFields = (form) => [...form.elements].filter((field) => field.name);

/** Return the settings of the form. A field that is empty or invalid is left out. */
function readSettings(form) {
  const sampling = {};
  for (const field of namedFields(form)) {
    const given = field.type === "number" && field.value !== "" && field.validity.valid;
    if (given) sampling[field.name] = field.valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) sampling.stop = stop;
  return { system: form.elements.system.value, sampling };
}

/** Ask for the API key, and return whether one was entered. */
function askForKey(reason) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key").value = "";
  return new Promise((resolve) => {
    let entered = false;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      remember("sessionStorage", KEY_ENTRY, byId("key").value.trim());
      entered = true;
      dialog.close();
    };
    dialog.onclose = () => resolve(entered);
    if (!dialog.open) dialog.showModal();
    byId("key").focus();
  });
}

/** Show a dialog with the focus on its title, so that no keyboard opens on a phone. */
function showDialog(dialog) {
  dialog.showModal();
  dialog.querySelector("h2").focus();
}

function setUpDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
  }
}

function setUpTheme() {
  const button = byId("theme");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    const label = `Theme: ${THEMES[theme]}`;
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon(theme));
  };
  const names = Object.keys(THEMES);
  const kept = recall("localStorage", THEME_ENTRY);
  show(kept in THEMES ? kept : "auto");
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    remember("localStorage", THEME_ENTRY, next);
    show(next);
  });
}

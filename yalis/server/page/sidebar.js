// The list of conversations, by the day of their last message.

/** Draw the list. `handlers` has open(id), rename(id, title), remove(id) and save(id), which exports. */
function drawSidebar(conversations, currentId, running, handlers) {
  const list = byId("chats");
  const parts = [];
  let shown = "";
  for (const conversation of conversations) {
    const period = periodOf(conversation.updated);
    if (period !== shown) parts.push(make("h2", {}, period));
    shown = period;
    parts.push(makeEntry(conversation, conversation.id === currentId, running.has(conversation.id), handlers));
  }
  if (!parts.length) parts.push(make("p", { class: "about" }, "Your chats will be listed here."));
  list.replaceChildren(...parts);
}

function makeEntry({ id, title }, current, running, handlers) {
  const open = textButton(title, "chat-title", () => handlers.open(id));
  open.title = title;
  if (current) open.setAttribute("aria-current", "true");
  const row = make("div", { class: `chat${current ? " current" : ""}${running ? " running" : ""}` }, open);
  const rename = () => {
    const field = make("input", { class: "rename", "aria-label": "Title", maxlength: "120" });
    field.value = title;
    let ended = false; // removing the field takes its focus, which ends the renaming as well
    const end = (changed) => {
      if (ended) return;
      ended = true;
      handlers.rename(id, changed && field.value.trim() ? field.value.trim() : title);
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    });
    row.replaceChildren(field);
    field.select();
  };
  open.addEventListener("dblclick", rename);
  row.append(make("div", { class: "chat-tools" }, iconButton("edit", `Rename “${title}”`, rename),
    iconButton("export", `Export “${title}”`, () => handlers.save(id)),
    iconButton("delete", `Delete “${title}”`, () => handlers.remove(id))));
  return row;
}

function periodOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const day = 24 * 3600 * 1000;
  if (time >= midnight) return "Today";
  if (time >= midnight - day) return "Yesterday";
  return time >= midnight - 7 * day ? "Last seven days" : "Earlier";
}

function showSidebar(shown) {
  document.body.classList.toggle("sidebar-open", shown);
  byId("open-sidebar").setAttribute("aria-expanded", String(shown));
  if (shown) byId("close-sidebar").focus();
}

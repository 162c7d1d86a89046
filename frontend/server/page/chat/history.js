// All conversations: kept in the browser, listed beside the chat, searched, renamed, deleted, saved to files and read from them.

import { $, button, make, named, notify, overlay, save } from "../dom.js";
import { create, markdown, matches, title } from "./conversation.js";
import { LARGEST_FILE, conversation as checked, imported } from "./record.js";
import * as store from "./store.js";
import { keep as keepSetting, kept } from "../storage.js";

const WIDE = matchMedia("(min-width: 64rem)"); // as in page.css
const OPEN = "pagewire.history"; // whether the list is shown beside the chat
const MOST = 500; // conversations that are listed; the others are found by a search
const panel = $("history");
const conversations = new Map(); // by id
let shown = null; // id of the one in view
let [choose, refresh] = [() => {}, () => {}];
let keeps = true; // false: the browser stores nothing

/** Read the conversations, and connect the list. `chosen(conversation)` shows one; null: a new one.
 * `changed(conversation)`: another tab has changed the one in view. */
export async function open({ chosen, changed }) {
  refresh = changed;
  choose = (conversation) => {
    if (panel.matches(":modal")) panel.close();
    chosen(conversation);
  };
  $("search").addEventListener("input", paint);
  $("open-history").onclick = () => (panel.open ? panel.close() : reveal());
  $("close-history").onclick = () => panel.close();
  $("export-all").onclick = () => save("pagewire conversations.json", JSON.stringify([...conversations.values()], null, 1), "application/json");
  $("import").onclick = () => $("import-file").click();
  $("import-file").onchange = readFile;
  panel.addEventListener("click", (event) => event.target === panel && panel.close()); // the backdrop
  panel.addEventListener("close", () => mark(false));
  WIDE.addEventListener("change", () => panel.close());
  if (WIDE.matches && kept(OPEN) !== "false") reveal();
  try {
    take(await store.all());
  } catch {
    keeps = false;
  }
  store.listen(elsewhere);
  paint();
}

/** List the stored records. Those that are no conversations stay where they are, and can be saved. */
function take(records) {
  const broken = [];
  for (const record of records) {
    try {
      const conversation = checked(record);
      conversations.set(conversation.id, conversation);
    } catch (error) {
      broken.push({ record, error });
    }
  }
  if (!broken.length) return;
  const text = `${broken.length} stored ${broken.length === 1 ? "record is no conversation" : "records are no conversations"} of this page (${broken[0].error.message}).`;
  notify(text, "Save to a file", () => save("pagewire records.json", JSON.stringify(broken.map(({ record }) => record), null, 1), "application/json"));
}

/** The conversations, newest first. */
export const listed = () => [...conversations.values()].sort((a, b) => b.changed - a.changed);

/** Store conversations, and list them. */
export async function keep(...given) {
  for (const conversation of given) conversations.set(conversation.id, conversation);
  paint();
  try {
    for (const conversation of given) if (keeps) await store.put(conversation);
  } catch (error) {
    keeps = false;
    notify(`Conversations can no longer be stored in this browser (${error.name}). Export those that matter.`);
  }
}

/** Mark the conversation in view. */
export function select(conversation) {
  shown = conversation.id;
  paint();
}

function elsewhere(id, record) {
  let conversation = null;
  try {
    conversation = record && checked(record);
  } catch {
    return; // of another version of this page
  }
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  paint();
  if (id === shown && conversation) refresh(conversation);
}

function reveal() {
  if (WIDE.matches) panel.open = true; // not show(), which takes the focus
  else overlay(panel);
  mark(true);
}

function mark(open) {
  $("open-history").setAttribute("aria-expanded", open);
  if (WIDE.matches) keepSetting(OPEN, String(open));
}

// ---------------------------------------------------------------- the list

let painted = ""; // what the list shows

/** Show the list, unless it is the same, or a title is being changed. */
function paint() {
  const query = $("search").value.trim();
  const all = listed().filter((conversation) => !query || matches(conversation, query));
  const found = all.slice(0, MOST);
  const content = JSON.stringify([shown, query, all.length, found.map((conversation) => [conversation.id, title(conversation), when(conversation.changed)])]);
  if (content === painted || $("conversations").querySelector("form")) return;
  painted = content;
  $("conversations").replaceChildren(...found.map(entry));
  $("none-found").hidden = found.length > 0 && found.length === all.length;
  const none = query ? "Nothing found." : "Conversations appear here.";
  $("none-found").textContent = found.length ? `${(all.length - found.length).toLocaleString("en")} older ones are not listed: search.` : none;
}

function entry(conversation) {
  const open = make("button", { type: "button", className: "open", onclick: () => choose(conversation) }, make("span", {}, title(conversation)), make("small", {}, when(conversation.changed)));
  if (conversation.id === shown) open.setAttribute("aria-current", "true");
  const item = make("li", {}, open);
  const actions = make(
    "div",
    { className: "tools" },
    button("edit", `Rename ${named(title(conversation))}`, () => rename(item, conversation)),
    button("save", `Export ${named(title(conversation))}`, () => save(`${title(conversation)}.md`, markdown(conversation), "text/markdown")),
    button("delete", `Delete ${named(title(conversation))}`, () => remove(conversation)),
  );
  item.append(actions);
  return item;
}

function when(time) {
  const [date, today] = [new Date(time), new Date()];
  if (date.toDateString() === today.toDateString()) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toLocaleDateString([], { day: "numeric", month: "short", ...(date.getFullYear() !== today.getFullYear() && { year: "numeric" }) });
}

function rename(item, conversation) {
  const input = make("input", { value: title(conversation), ariaLabel: "Title", maxLength: 120 });
  const form = make("form", {}, input);
  let done = false;
  const end = (given) => {
    if (done) return;
    done = true;
    if (given) conversation.title = input.value.trim();
    form.remove();
    painted = "";
    keep(conversation);
  };
  form.addEventListener("submit", (event) => (event.preventDefault(), end(true)));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the dialog stays open
    event.stopPropagation();
    end(false);
  });
  input.addEventListener("blur", () => end(true));
  item.replaceChildren(form);
  input.focus();
  input.select();
}

async function remove(conversation) {
  conversations.delete(conversation.id);
  if (keeps) await store.remove(conversation.id);
  paint();
  if (conversation.id === shown) choose(null);
  notify(`Deleted “${named(title(conversation))}”.`, "Undo", () => (keep(conversation), choose(conversation)));
}

async function readFile() {
  const [file] = $("import-file").files;
  if (!file) return;
  const name = named(file.name);
  const refuse = (why) => notify(`${name} was not imported: ${why}.`);
  let text;
  try {
    if (file.size > LARGEST_FILE) return refuse(`it is larger than ${LARGEST_FILE / 1e6} MB`);
    text = await file.text();
  } catch (error) {
    return refuse(`it cannot be read (${error.name})`);
  } finally {
    $("import-file").value = "";
  }
  const { conversations: found, problems } = imported(text, create);
  await keep(...found);
  if (!found.length) return refuse(problems[0] ?? "it has no conversations");
  const added = found.length === 1 ? "1 conversation was added" : `${found.length} conversations were added`;
  const left = problems.length === 1 ? "1 was not" : `${problems.length} were not`;
  notify(problems.length ? `${name}: ${added}, ${left} (${problems[0]}).` : `${added}.`);
}

// The settings panel: request fields and the API key. Stored in this browser; the API key only in this tab.

import { models } from "./api.js";
import { $, make } from "./dom.js";

const KEPT = "pagewire.settings";
const KEY = "pagewire.key";
const WIDE = matchMedia("(min-width: 64rem)"); // as in page.css
const form = $("settings-form");
const panel = $("settings");

/** The request fields of the form; an empty field is not sent. */
export function read() {
  const fields = { model: form.elements.model.value };
  for (const { name, type, value } of form.elements) {
    if (type === "number" && value !== "") fields[name] = Number(value);
  }
  const stop = form.elements.stop.value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  return fields;
}

/** The system prompt as a list of one message, or none. */
export function system() {
  const content = form.elements.system.value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Fill the list of models from the server. */
export async function offerModels() {
  const select = form.elements.model;
  const selected = select.value || kept().model;
  const names = await models();
  select.replaceChildren(...names.map((name) => make("option", {}, name)));
  if (names.includes(selected)) select.value = selected;
  return select.value;
}

/** Connect the panel's events. `onModel()` is called after a change of the model or the API key. */
export function open(onModel) {
  for (const [name, value] of Object.entries(kept())) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.elements.key.value = sessionStorage.getItem(KEY) ?? "";
  form.addEventListener("input", keep);
  form.addEventListener("change", ({ target }) => ["key", "model"].includes(target.name) && onModel());
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => (keep(), onModel())));
  $("open-settings").onclick = () => (panel.open ? panel.close() : reveal());
  $("close-settings").onclick = () => panel.close();
  panel.addEventListener("click", (event) => event.target === panel && panel.close()); // the backdrop
  panel.addEventListener("close", () => mark(false));
  WIDE.addEventListener("change", () => panel.close());
}

function reveal() {
  if (WIDE.matches) panel.show(); // beside the conversation
  else panel.showModal(); // over it
  mark(true);
}

function mark(open) {
  $("open-settings").setAttribute("aria-expanded", open);
  document.body.classList.toggle("with-settings", open);
}

function kept() {
  return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
}

function keep() {
  const { key, ...rest } = Object.fromEntries(new FormData(form));
  localStorage.setItem(KEPT, JSON.stringify(rest));
  if (key) sessionStorage.setItem(KEY, key.trim());
  else sessionStorage.removeItem(KEY);
}

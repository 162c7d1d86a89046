// The page at `/`: views over one server.

import * as chat from "./chat/chat.js";
import * as compare from "./chat/compare.js";
import { $, notify, say } from "./dom.js";
import * as embed from "./embed/embed.js";
import * as engine from "./engine/engine.js";
import * as settings from "./settings/settings.js";

const VIEWS = ["chat", "compare", "embed", "engine"];

function choose() {
  const view = VIEWS.find((name) => location.hash === `#${name}`) ?? VIEWS[0];
  for (const name of VIEWS) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = view;
  if (view === "engine") engine.paint();
  else if (view === "chat" && matchMedia("(pointer: fine)").matches) $("question").focus();
}

/** Show what fits the models of the server; also after a change of the model or the API key. */
async function showModels() {
  let error = null;
  try {
    await settings.offerModels();
  } catch (problem) {
    if ($("chat").hidden) say(problem.message); // the chat shows it
    error = problem;
  }
  chat.showModel(error);
  compare.showModels();
  embed.showModels();
}

settings.open(showModels);
compare.open();
embed.open();
engine.open(showModels);
addEventListener("hashchange", choose);
choose();
chat
  .open()
  .catch((error) => notify(`The conversations cannot be shown (${error.message}).`))
  .finally(() => (document.body.dataset.ready = "true"));
showModels();

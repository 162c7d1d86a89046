// The page at `/`: two views over one server, the chat and the engine.

import * as chat from "./chat.js";
import { $, say } from "./dom.js";
import * as engine from "./engine.js";
import * as settings from "./settings.js";

const VIEWS = ["chat", "engine"];

function choose() {
  const view = VIEWS.find((name) => location.hash === `#${name}`) ?? VIEWS[0];
  for (const name of VIEWS) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = view;
  if (view === "engine") engine.paint();
  else if (matchMedia("(pointer: fine)").matches) $("question").focus();
}

async function nameModel() {
  try {
    $("welcome-model").textContent = (await settings.offerModels()) || "the model";
  } catch (error) {
    say(error.message); // for screen readers; others see the state of the engine in the header
  }
}

settings.open(nameModel);
chat.open();
engine.open();
addEventListener("hashchange", choose);
choose();
nameModel();

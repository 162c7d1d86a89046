// The live view of the engine: /metrics is read once a second while the page is visible; a card for each figure.

import { call } from "../net/api.js";
import { $, make } from "../dom.js";
import { askKey } from "../settings/settings.js";
import { offer } from "../settings/models.js";
import { WIDTH, card } from "./chart.js";
import { History, modelsOf, parse, read } from "./metrics.js";
import * as state from "./state.js";
import * as timeline from "./timeline.js";

const PERIOD = 1000; // milliseconds

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const some = (value) => (value < 10 ? String(Number(value.toFixed(1))) : whole(value));
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}%`;
const time = (value) => (value < 1 ? `${some(1000 * value)} ms` : `${Number(value.toFixed(2))} s`);

let history = new History(WIDTH);
const now = () => history.last?.time ?? 0;
const gauge = (name) => () => history.gauge(name);
const rate = (name) => () => history.rate(name);
const share = (part, all) => () => history.share(part, all);
const percentiles = (name) => ({ median: () => history.quantile(name, 0.5), "95th percentile": () => history.quantile(name, 0.95) });
const CARDS = [
  card("Tokens per second", (value) => `${some(value)}/s`, { generated: rate("generated"), prompt: rate("prompt") }, now, { broad: true }),
  card("Requests", whole, { running: gauge("running"), waiting: gauge("waiting") }, now, { broad: true, counts: true }),
  card("KV cache in use", percent, { "of blocks": gauge("kv") }, now, { top: 1 }),
  card("Prefix cache hits", percent, { "of prompt tokens": share("hits", "queries") }, now, { top: 1 }),
  card("Tokens in a step", some, { "batch, on average": () => history.share("stepTokens", "steps", 5) }, now, { broad: true }),
  card("Time to first token", time, percentiles("ttft"), now, { broad: true }),
  card("Time between tokens", time, percentiles("itl"), now, { broad: true }),
  card("Worker computing", percent, { "of the time": rate("busy") }, now, { top: 1 }),
  card("Drafts accepted", percent, { "of drafted tokens": share("accepted", "drafted") }, now, { top: 1 }),
  card("Requests finished", whole, { total: gauge("finished") }, now, { counts: true }),
  card("Preemptions", whole, { total: gauge("preempted") }, now, { counts: true }),
];

let back = () => {};

/** Show the cards, and update them while the page is visible. returned(): the server answers again, after it did not. */
export function open(returned) {
  back = returned;
  $("cards").append(...CARDS.map(({ node }) => node));
  $("engine-model").onchange = () => {
    history = new History(WIDTH);
    poll();
  };
  document.addEventListener("visibilitychange", () => document.hidden || poll());
  poll();
}

let timer = 0;
let polling = false;

async function poll() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  try {
    const samples = parse(await (await call("metrics", { signal: AbortSignal.timeout(5000) })).text());
    const models = modelsOf(samples);
    offer($("engine-model"), models.map((name) => ({ name })));
    $("engine-model").parentElement.hidden = models.length < 2;
    history.push(read(samples, $("engine-model").value), performance.now() / 1000);
    if ($("pulse").className === "lost") back();
    pulse("live", sentence(history.last));
    $("engine-note").textContent = "The last three minutes, measured every second.";
  } catch (error) {
    const reason = error.status === 401 ? [keyNeeded()] : [error.status ? `no metrics (${error.status})` : "not reachable"];
    pulse("lost", reason);
    $("engine-note").textContent = error.status ? `No metrics: ${error.message}` : "The server cannot be reached. Retrying.";
  }
  polling = false;
  if (!$("engine").hidden) paint();
  if (!document.hidden) timer = setTimeout(poll, PERIOD);
}

/** Draw everything of the view. */
export function paint() {
  state.paint($("engine-model").value, history.last);
  timeline.paint();
  for (const { update } of CARDS) update();
}

/** The way from the state in the header to the field of the key; the same button while the state stays. */
let button = null;
function keyNeeded() {
  button ??= make("button", { type: "button", className: "plain", onclick: askKey }, "API key needed");
  return button;
}

function sentence({ running, waiting }) {
  if (!running && !waiting) return ["idle"];
  const generated = history.rate("generated").at(-1)?.[1];
  return [`${running} running`, waiting && `${waiting} waiting`, generated > 0 && `${some(generated)} tok/s`].filter(Boolean);
}

function pulse(name, parts) {
  $("pulse").className = name;
  if ($("pulse-text").contains(button) && parts[0] === button) return; // it may have the focus
  $("pulse-text").replaceChildren(...parts.map((part) => (part instanceof Node ? part : make("span", {}, part))));
}

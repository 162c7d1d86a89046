// The live view of the engine: /metrics is read once a second while the page is visible; a card for each figure.

import { call } from "./api.js";
import { $, draw, make } from "./dom.js";
import { History, read } from "./metrics.js";

const PERIOD = 1000; // milliseconds
const [WIDTH, HEIGHT] = [180, 48]; // size of a chart in SVG units: horizontally one per second

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const some = (value) => (value < 10 ? value.toFixed(1) : whole(value));
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`;
const time = (value) => (value < 1 ? `${some(1000 * value)} ms` : `${value.toFixed(2)} s`);

const history = new History(WIDTH);
const CARDS = [
  card("Tokens per second", some, { generated: () => history.rate("generated"), prompt: () => history.rate("prompt") }, { broad: true }),
  card("Requests", whole, { running: () => history.gauge("running"), waiting: () => history.gauge("waiting") }, { broad: true }),
  card("KV cache in use", percent, { "of blocks": () => history.gauge("kv") }, { top: 1 }),
  card("Prefix cache hits", percent, { "of prompt tokens": () => history.share("hits", "queries") }, { top: 1 }),
  card("Requests finished", whole, { total: () => history.gauge("finished") }),
  card("Preemptions", whole, { total: () => history.gauge("preempted") }),
  card("Time to first token", time, percentiles("ttft"), { broad: true }),
  card("Time between tokens", time, percentiles("itl"), { broad: true }),
];

function percentiles(name) {
  return { median: () => history.quantile(name, 0.5), "95th percentile": () => history.quantile(name, 0.95) };
}

/** Show the cards, and update them while the page is visible. */
export function open() {
  $("cards").append(...CARDS.map(({ node }) => node));
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
    const text = await (await call("metrics", { signal: AbortSignal.timeout(5000) })).text();
    history.push(read(text), performance.now() / 1000);
    pulse("live", sentence(history.last));
    $("engine-note").textContent = "The last three minutes, measured every second.";
  } catch (error) {
    pulse("lost", [error.status ? `no metrics (${error.status})` : "not reachable"]);
    $("engine-note").textContent = error.status ? `No metrics: ${error.message}` : "The server cannot be reached. Retrying.";
  }
  polling = false;
  if (!$("engine").hidden) paint();
  if (!document.hidden) timer = setTimeout(poll, PERIOD);
}

/** Draw all cards. */
export function paint() {
  for (const { update } of CARDS) update();
}

function sentence({ running, waiting }) {
  if (!running && !waiting) return ["idle"];
  const rate = history.rate("generated").at(-1)?.[1];
  return [`${running} running`, waiting && `${waiting} waiting`, rate > 0 && `${some(rate)} tok/s`].filter(Boolean);
}

function pulse(state, parts) {
  $("pulse").className = state;
  $("pulse-text").replaceChildren(...parts.map((part) => make("span", {}, part)));
}

/** A card: a title, the newest value of each series, and their lines. `top`: upper end of the scale; else automatic. */
function card(title, format, series, { top, broad } = {}) {
  const peak = make("span", { className: "peak" });
  const [values, lines] = [[], []];
  const legend = make("dl");
  const marker = draw("line", { class: "marker", y1: 0, y2: HEIGHT, visibility: "hidden" });
  const names = Object.keys(series);
  names.forEach((name, i) => {
    values.push(make("dd", {}, "–"));
    lines.push([draw("path", { class: `area s${i}` }), draw("path", { class: `line s${i}` })]);
    legend.append(make("div", { className: `s${i}` }, make("dt", {}, name), values[i]));
  });
  const chart = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, the last three minutes` },
    ...[1, 16, 32].map((y) => draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y })),
    ...lines.flat(),
    marker,
  );
  let age = null; // position of the pointer, in seconds before now
  const update = () => {
    const now = history.last?.time ?? 0;
    const drawn = names.map((name) => series[name]().filter(([, value]) => Number.isFinite(value)));
    const most = Math.max(0, ...drawn.flat().map(([, value]) => value));
    drawn.forEach((points, i) => {
      const shown = points.findLast(([at]) => at <= now - (age ?? 0));
      values[i].textContent = shown && shown[0] > now - (age ?? 0) - 4 ? format(shown[1]) : "–";
      const path = trace(points, now, top ?? (most * 1.15 || 1));
      lines[i][1].setAttribute("d", path.line);
      lines[i][0].setAttribute("d", path.area);
    });
    peak.textContent = age !== null ? `${Math.round(age)} s ago` : most > 0 ? `peak ${format(most)}` : "";
    marker.setAttribute("visibility", age === null ? "hidden" : "visible");
    marker.setAttribute("x1", WIDTH - (age ?? 0));
    marker.setAttribute("x2", WIDTH - (age ?? 0));
  };
  chart.addEventListener("pointermove", ({ clientX }) => {
    const box = chart.getBoundingClientRect();
    age = WIDTH * (1 - (clientX - box.left) / box.width);
    update();
  });
  chart.addEventListener("pointerleave", () => ((age = null), update()));
  const node = make("section", { className: broad ? "card broad" : "card" }, make("div", { className: "head" }, make("h2", {}, title), peak), legend, chart);
  return { node, update };
}

/** The SVG paths of a series: its line, and the area under it. More than 4 s without a value is a gap. */
function trace(points, now, top) {
  let [line, area, from, last] = ["", "", null, null];
  for (const [at, value] of points) {
    const x = (WIDTH - (now - at)).toFixed(2);
    const y = (HEIGHT - (value / top) * (HEIGHT - 2) - 1).toFixed(2);
    if (last !== null && at - last.at <= 4) line += `L${x} ${y}`;
    else {
      if (last) area += `L${last.x} ${HEIGHT}L${from} ${HEIGHT}Z`;
      line += `M${x} ${y}`;
      area += `M${x} ${HEIGHT}`;
      from = x;
    }
    area += `L${x} ${y}`;
    last = { at, x };
  }
  if (last) area += `L${last.x} ${HEIGHT}L${from} ${HEIGHT}Z`;
  return { line, area };
}

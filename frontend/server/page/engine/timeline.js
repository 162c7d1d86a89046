// Where the time of this page's last requests went: a row for each, from the header Server-Timing and from its stream.

import { $, make } from "../dom.js";

const MOST = 12; // rows
// As in `Exchange.server_timing`: the server's stages until the first token is sent; then comes the stream.
const STAGES = [
  ["prepare", "Reading, template and tokens"],
  ["queue", "Waiting for a place in a batch"],
  ["prefill", "Reading the prompt"],
  ["stream", "Writing the answer"],
];
const PARTS = { body: "prepare", prepare: "prepare", submit: "queue", queue: "queue", prefill: "prefill" };
const rows = [];

/** Note that a request begins; its end is told to the result. */
export function record(model) {
  const row = { model, at: new Date(), began: performance.now(), stages: {}, ended: null, tokens: 0, fate: "" };
  rows.unshift(row);
  rows.length = Math.min(rows.length, MOST);
  return {
    /** header: value of Server-Timing, or null. */
    stages(header) {
      for (const [, name, duration] of (header ?? "").matchAll(/(\w+);dur=([\d.]+)/g)) {
        const stage = PARTS[name];
        if (stage) row.stages[stage] = (row.stages[stage] ?? 0) + Number(duration);
      }
    },
    end(tokens, fate) {
      Object.assign(row, { ended: performance.now(), tokens, fate });
    },
  };
}

const sum = (stages) => Object.values(stages).reduce((total, duration) => total + duration, 0);
const span = (milliseconds) => (milliseconds < 1000 ? `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms` : `${(milliseconds / 1000).toFixed(2)} s`);

/** Draw the rows. */
export function paint() {
  $("timeline-empty").hidden = rows.length > 0;
  $("timeline").hidden = rows.length === 0;
  const now = performance.now();
  const totals = rows.map(({ began, ended }) => (ended ?? now) - began);
  const longest = Math.max(1, ...totals);
  $("timeline-rows").replaceChildren(...rows.map((row, i) => drawn(row, totals[i], longest)));
  $("timeline-scale").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => make("span", {}, part ? span(part * longest) : "0")));
}

function drawn({ model, at, stages, ended, tokens, fate }, total, longest) {
  const all = { ...stages, stream: Math.max(0, total - sum(stages)) };
  const bar = make("div", { className: "bar", ariaHidden: "true" });
  for (const [name, label] of STAGES) {
    if (!all[name]) continue;
    const part = make("i", { className: `stage-${name}`, title: `${label}: ${span(all[name])}` });
    part.style.width = `${(100 * all[name]) / longest}%`;
    bar.append(part);
  }
  const told = STAGES.filter(([name]) => all[name] >= 0.05).map(([name, label]) => `${label.toLowerCase()} ${span(all[name])}`);
  const state = fate || (ended ? `${tokens} tokens` : "running");
  return make(
    "li",
    {},
    make("span", { className: "when" }, `${at.toLocaleTimeString()} · ${model} · ${state}`),
    bar,
    make("span", { className: "total" }, span(total)),
    make("span", { className: "unseen" }, told.join(", ")),
  );
}

// A card with a chart: the newest value of each series, and their lines over the last three minutes, with scales.

import { draw, make } from "../dom.js";

export const WIDTH = 180; // of a chart in SVG units: one per second
const HEIGHT = 60;
const GAP = 4; // seconds without a value that end a line

/** The round number at or above a value, of which half and whole are the marks of a scale: 1, 2 or 5 times a power of 10;
 * counts: an even number. */
export function roundUp(value, counts = false) {
  if (!(value > 0)) return counts ? 2 : 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const end = (counts ? [1, 2, 4, 6, 10] : [1, 2, 5, 10]).find((factor) => factor * power >= value * (1 - 1e-9)) * power;
  return counts ? Math.max(2, end) : end;
}

/** A card. series: functions by name that return [[time, value], ...]. format(value): the value with its unit.
 * top: upper end of the scale; else automatic. counts: values are whole numbers. now(): time of the right end. */
export function card(title, format, series, now, { top, broad, counts } = {}) {
  const peak = make("span", { className: "peak" });
  const names = Object.keys(series);
  const values = names.map(() => make("dd", {}, "–"));
  const legend = make("dl", {}, ...names.map((name, i) => make("div", { className: `s${i}` }, make("dt", {}, name), values[i])));
  const lines = names.map((_, i) => [draw("path", { class: `area s${i}` }), draw("path", { class: `line s${i}` })]);
  const marker = draw("line", { class: "marker", y1: 0, y2: HEIGHT, visibility: "hidden" });
  const marks = [1, 0.5, 0].map(() => make("span"));
  const chart = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, the last three minutes` },
    ...[0, 0.5, 1].map((part) => draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: part * HEIGHT, y2: part * HEIGHT })),
    ...lines.flat(),
    marker,
  );
  let age = null; // position of the pointer, in seconds before now
  const update = () => {
    const at = now();
    const drawn = names.map((name) => series[name]().filter(([, value]) => Number.isFinite(value)));
    const most = Math.max(0, ...drawn.flat().map(([, value]) => value));
    const end = top ?? roundUp(most, counts);
    drawn.forEach((points, i) => {
      const shown = points.findLast(([time]) => time <= at - (age ?? 0));
      values[i].textContent = shown && shown[0] > at - (age ?? 0) - GAP ? format(shown[1]) : "–";
      const path = trace(points, at, end);
      lines[i][1].setAttribute("d", path.line);
      lines[i][0].setAttribute("d", path.area);
    });
    marks.forEach((mark, i) => (mark.textContent = i === 2 ? "0" : format((end * (2 - i)) / 2)));
    peak.textContent = age !== null ? `${Math.round(age)} s ago` : most > 0 ? `peak ${format(most)}` : "";
    chart.setAttribute("aria-label", `${title}, the last three minutes: ${names.map((name, i) => `${name} ${values[i].textContent}`).join(", ")}; highest ${format(most)}`);
    marker.setAttribute("visibility", age === null ? "hidden" : "visible");
    for (const x of ["x1", "x2"]) marker.setAttribute(x, WIDTH - (age ?? 0));
  };
  chart.addEventListener("pointermove", ({ clientX }) => {
    const box = chart.getBoundingClientRect();
    age = WIDTH * (1 - (clientX - box.left) / box.width);
    update();
  });
  chart.addEventListener("pointerleave", () => ((age = null), update()));
  const times = make("div", { className: "times", ariaHidden: "true" }, ...["3 min ago", "2 min", "1 min", "now"].map((text) => make("span", {}, text)));
  const plot = make("div", { className: "plot" }, make("div", { className: "scale", ariaHidden: "true" }, ...marks), chart, times);
  const node = make("section", { className: broad ? "card broad" : "card" }, make("div", { className: "head" }, make("h2", {}, title), peak), legend, plot);
  return { node, update };
}

/** The SVG paths of a series: its line, and the area under it. A time without values is a gap. */
function trace(points, now, top) {
  let [line, area, from, last] = ["", "", null, null];
  for (const [at, value] of points) {
    const x = (WIDTH - (now - at)).toFixed(2);
    const y = (HEIGHT - (value / top) * (HEIGHT - 1) - 0.5).toFixed(2);
    if (last !== null && at - last.at <= GAP) line += `L${x} ${y}`;
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

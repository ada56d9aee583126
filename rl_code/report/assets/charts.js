"use strict";
// Curves with a shared cross-hair, and the stacked times. Everything is drawn from the JSON in #data.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
const colour = (i) => `var(--c${i % 8})`;
const charts = [];

/** An element with attributes and children; strings become text nodes, so nothing is ever parsed as HTML. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") node.addEventListener("click", value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

/** digits: how many of the value's digits are shown, zeros at the end left out. */
function format(value, fraction, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (fraction) return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", "\u202f") : String(+value.toPrecision(digits));
  return text.replace("-", "−");
}

/** Round values that cover [low, high]. */
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

/** Mean of the middle of a window around each point, so that a spike stays a spike; missing values stay missing. */
function smooth(values) {
  const half = Math.round(values.length / 40);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((x) => x !== null);
    near.sort((a, b) => a - b);
    const cut = Math.floor(near.length / 4), middle = near.slice(cut, near.length - cut);
    return middle.reduce((a, b) => a + b, 0) / middle.length;
  });
}

function path(values, x, y) {
  let text = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) return; // metrics that are not logged every step are joined
    text += pen + x(i).toFixed(1) + " " + y(value).toFixed(1);
    pen = "L";
  });
  return text;
}

const shorten = (names) => names.map((name) => name.replace(/^[^/]*\//, "").replaceAll("_", " "));

// Charts are drawn again when their width is another one: of the window, or once they can be seen.
const sizes = new ResizeObserver((entries) => {
  for (const chart of charts) {
    const width = chart.svg.clientWidth;
    if (width && width !== chart.width && entries.some((entry) => entry.target === chart.svg)) chart.draw();
  }
});

class Chart {
  /** curves: the set that the chart belongs to; its charts share a cross-hair. */
  constructor(parent, curves, { title, names, fraction, labels, series, stacked }) {
    Object.assign(this, { curves, names, fraction, stacked, labels: labels || shorten(names) });
    this.series = series || names.map((name) => curves.series[name]);
    this.bands = names.map((name) => (curves.bands || {})[name] || []);
    this.others = series ? [] : curves.others.map((other) => names.map((name) => other.series[name]));
    this.legend = el("div", { class: "legend" });
    this.values = this.labels.map((label, i) => {
      const value = el("b");
      this.legend.append(el("span", {}, el("i", { style: `background:${colour(i)}` }), label, value));
      return value;
    });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", title);
    this.figure = el("figure", {}, el("figcaption", {}, title), this.legend, this.svg);
    parent.append(this.figure);
    this.svg.addEventListener("pointermove", (event) => hover(curves, this.index(event)));
    this.svg.addEventListener("pointerleave", () => hover(curves, null));
    if (curves === DATA.curves) this.svg.addEventListener("click", (event) => openStep(curves.steps[this.index(event)]));
    charts.push(this);
    this.draw();
    sizes.observe(this.svg);
  }

  index(event) {
    const box = this.svg.getBoundingClientRect(), steps = this.curves.steps;
    const share = (event.clientX - box.left - LEFT) / Math.max(1, this.width - LEFT - RIGHT);
    const step = steps[0] + share * (steps[steps.length - 1] - steps[0]);
    let best = 0;
    steps.forEach((s, i) => { if (Math.abs(s - step) < Math.abs(steps[best] - step)) best = i; });
    return best;
  }

  range() {
    const series = this.stacked ? [this.stack[this.stack.length - 1], [0]] : [...this.series, ...this.others.flat(), ...this.bands.flat()];
    const values = series.flat().filter((value) => value !== null);
    if (!values.length) return [0, 1];
    // One spike in two hundred points must not flatten the rest.
    const sorted = [...values].sort((a, b) => a - b);
    const at = (q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
    let low = sorted[0], high = sorted[sorted.length - 1];
    if (high > 0 && sorted.length > 50 && high > 4 * Math.abs(at(0.985)) && at(0.985) > 0) high = 1.3 * at(0.985);
    if (low > 0 && low < 0.9 * high) low = 0;
    if (this.fraction) { low = Math.max(0, Math.min(low, 0)); high = Math.min(Math.max(high * 1.05, 0.05), Math.max(1, high)); }
    if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; low -= low === 0 ? 0 : pad; }
    return [low, high];
  }

  draw() {
    const width = (this.width = this.svg.clientWidth || 420), height = this.stacked ? 230 : HEIGHT;
    const steps = this.curves.steps, first = steps[0], span = steps[steps.length - 1] - first || 1;
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    if (this.stacked) this.stack = stackUp(this.series);
    const [low, high] = this.range();
    const x = (this.x = (i) => LEFT + ((steps[i] - first) / span) * (width - LEFT - RIGHT));
    const y = (this.y = (v) => TOP + (1 - (Math.min(v, high + (high - low) * 0.04) - low) / (high - low)) * (height - TOP - BOTTOM));
    const levels = ticks(low, high, 4), apart = levels[1] - levels[0];
    for (const tick of levels) {
      const digits = tick && apart ? Math.max(3, Math.ceil(Math.log10(Math.abs(tick) / apart)) + 2) : 3; // neighbours differ
      shape(this.svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) });
      const text = this.fraction ? +(100 * tick).toPrecision(6) + " %" : format(tick, false, digits);
      shape(this.svg, "text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, text);
    }
    const whole = ticks(first, first + span, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
    for (const tick of whole) {
      const at = LEFT + ((tick - first) / span) * (width - LEFT - RIGHT);
      shape(this.svg, "text", { x: at, y: height - 5, "text-anchor": "middle" }, String(tick));
    }
    if (this.stacked) this.areas(x, y);
    else {
      this.bands.forEach((band, i) => this.band(band, i, x, y));
      for (const other of this.others) other.forEach((values, i) => this.line(values, i, x, y, "5 4"));
      this.series.forEach((values, i) => this.line(values, i, x, y));
    }
    this.cross = shape(this.svg, "line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    this.dots = this.series.map((_, i) => shape(this.svg, "circle", { r: 3, fill: colour(i), visibility: "hidden" }));
    this.read(null);
  }

  line(values, i, x, y, dashes = "none") {
    const style = { fill: "none", stroke: colour(i), "stroke-linejoin": "round", "stroke-dasharray": dashes };
    const known = values.filter((value) => value !== null);
    if (!known.length) return;
    if (known.length === 1) {
      const at = values.indexOf(known[0]);
      shape(this.svg, "circle", { cx: x(at), cy: y(known[0]), r: 2.5, fill: colour(i) });
    } else if (known.length > 40) {
      if (dashes === "none") shape(this.svg, "path", { ...style, class: "raw", "stroke-width": 1, d: path(values, x, y) });
      shape(this.svg, "path", { ...style, "stroke-width": 1.8, d: path(smooth(values), x, y) });
    } else shape(this.svg, "path", { ...style, "stroke-width": 1.8, d: path(values, x, y) });
  }

  /** The interval around a curve: [lows, highs], or [] without one. */
  band([low, high], i, x, y) {
    if (!low) return;
    const back = [];
    low.forEach((value, j) => { if (value !== null) back.unshift(`L${x(j).toFixed(1)} ${y(value).toFixed(1)}`); });
    shape(this.svg, "path", { d: path(high, x, y) + back.join("") + "Z", fill: colour(i), "fill-opacity": 0.16 });
  }

  areas(x, y) {
    this.stack.forEach((upper, i) => {
      const lower = i ? this.stack[i - 1] : upper.map(() => 0);
      const back = lower.map((value, j) => `L${x(j).toFixed(1)} ${y(value).toFixed(1)}`).reverse().join("");
      shape(this.svg, "path", { d: path(upper, x, y) + back + "Z", fill: colour(i), "fill-opacity": 0.72 });
    });
  }

  /** Shows the values at a point of the curves, or the last ones. */
  read(i) {
    this.values.forEach((node, s) => {
      const values = this.series[s];
      let at = i;
      if (at === null) for (at = values.length - 1; at > 0 && values[at] === null;) at--;
      const beside = this.others.map((other) => format(lastKnown(other[s], i), this.fraction));
      node.textContent = [format(values[at], this.fraction) + (this.stacked ? " s" : ""), ...beside].join(" / ");
      const height = this.stacked ? this.stack[s][at] : values[at];
      const shown = i !== null && height !== null;
      this.dots[s].setAttribute("visibility", shown ? "visible" : "hidden");
      if (shown) { this.dots[s].setAttribute("cx", this.x(at)); this.dots[s].setAttribute("cy", this.y(height)); }
    });
    this.cross.setAttribute("visibility", i === null ? "hidden" : "visible");
    if (i !== null) { this.cross.setAttribute("x1", this.x(i)); this.cross.setAttribute("x2", this.x(i)); }
  }
}

/** The value at a point, or the last one there is. */
function lastKnown(values, i) {
  let at = i;
  if (at === null) for (at = values.length - 1; at > 0 && values[at] === null;) at--;
  return values[at];
}

function stackUp(series) {
  let below = series[0].map(() => 0);
  return series.map((values) => (below = values.map((value, i) => below[i] + Math.max(0, value || 0))));
}

function hover(curves, i) {
  for (const chart of charts) if (chart.curves === curves) chart.read(i);
  showTip(i === null ? null : `step ${curves.steps[i]}`);
}

const tip = document.getElementById("tip");
let pointer = { clientX: 0, clientY: 0 };
document.addEventListener("pointermove", (event) => { pointer = event; placeTip(); }, true);

function showTip(text) {
  tip.hidden = text === null;
  if (text !== null) { tip.textContent = text; placeTip(); }
}

function placeTip() {
  if (tip.hidden) return;
  const { clientX, clientY } = pointer;
  tip.style.left = Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = (clientY + 18 + tip.offsetHeight > innerHeight ? clientY - tip.offsetHeight - 10 : clientY + 18) + "px";
}

/** Tells two runs apart; nothing where there is one. */
const legendOfRuns = ({ run, others }) => others.length ? ` Solid: ${run}; dashed: ${others.map((other) => other.run).join(", ")}; values in this order.` : "";

function drawCurves() {
  const { curves } = DATA, parent = document.getElementById("charts");
  drawEvaluations();
  drawWarmStart();
  const note = document.getElementById("curves-note");
  if (!curves.steps.length) { note.textContent = "No step has been logged."; document.getElementById("time").hidden = true; return; }
  for (const chart of curves.charts) new Chart(parent, curves, chart);
  const mean = curves.every > 1 ? ` Each point is the mean of ${curves.every} steps.` : "";
  note.textContent = "Against the step of training; the strong line is a running mean of the faint one without its extremes; spikes off the scale are cut. " +
    "Hover to read all curves at one step, click to open its trajectories." + mean + legendOfRuns(curves);
  const rest = document.getElementById("rest");
  rest.hidden = !curves.rest.length;
  rest.addEventListener("toggle", () => {
    if (rest.open && !rest.dataset.drawn) {
      rest.dataset.drawn = "yes";
      for (const chart of curves.rest) new Chart(rest.querySelector(".charts"), curves, chart);
    }
  });
  drawTime();
}

function drawEvaluations() {
  const curves = DATA.evaluations;
  if (!curves.charts.length) return;
  for (const chart of curves.charts) new Chart(document.getElementById("evaluation-charts"), curves, chart);
  document.getElementById("evaluation-note").textContent = "Against the step of training; the bands are the 95 % intervals." + legendOfRuns(curves);
}

function drawWarmStart() {
  const curves = DATA.warm_start;
  document.getElementById("warm").hidden = !curves.steps.length;
  document.querySelector('nav a[href="#warm"]').hidden = !curves.steps.length;
  if (!curves.steps.length) return;
  for (const chart of [...curves.charts, ...curves.rest]) new Chart(document.getElementById("warm-charts"), curves, chart);
  document.getElementById("warm-note").textContent = "Supervised training on demonstrations, against its own steps." + legendOfRuns(curves);
}

function drawTime() {
  const { curves } = DATA, { times } = curves, parent = document.getElementById("time-charts");
  document.getElementById("time").hidden = !times.length;
  for (const { title, layers } of times) {
    const sums = layers.map(({ values }) => values.reduce((a, b) => a + (b || 0), 0)), all = sums.reduce((a, b) => a + b, 0) || 1;
    const labels = layers.map(({ label }, i) => `${label} (${Math.round((100 * sums[i]) / all)} %)`);
    new Chart(parent, curves, {
      title: `${title}, and share of the run`, names: layers.map(({ name }) => name), labels,
      series: layers.map(({ values }) => values), stacked: true,
    });
  }
}

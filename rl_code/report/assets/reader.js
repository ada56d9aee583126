"use strict";
// The reader of trajectories: a filtered list, and one trajectory turn by turn.

const TOKENS = DATA.trajectories.tokens || [];
const SOURCES = DATA.trajectories.sources || []; // steps of training and evaluations
const KINDS = {
  all: () => true,
  passed: (s) => s.passed,
  failed: (s) => s.passed === false, // null: not recorded
  repaired: (s) => s.passed && s.first_edit_passed === false, // null: not known
  flagged: (s) => s.reward.flags.length > 0,
  malformed: (s) => s.malformed_calls > 0,
};
const DARKEST = 500; // hundredths of a nat at which a token's background is at its strongest
const view = { kind: "all", source: null, query: "", mode: "calls", shown: [], current: null };
const at = (id) => document.getElementById(id);

const nameOf = (source) => (source.run ? source.run + ": " : "") + source.label;
const samples = SOURCES.flatMap((source) =>
  source.groups.flatMap((group) => group.samples.map((sample) => ({ ...sample, source, group, key: `${nameOf(source)}/${group.group}/${sample.index}` }))));

const textOf = (sample, start = 0, end = sample.tokens.length) =>
  sample.tokens.slice(start, end).map((t) => TOKENS[t][1]).join("");

/** Everything of a sample that a search looks at, in lower case; made once. */
function haystack(sample) {
  sample.text ??= [sample.group.task_id, sample.status, ...sample.reward.flags, textOf(sample),
    ...sample.turns.flatMap((turn) => [...turn.calls.map((c) => c.name), ...turn.results.map((r) => r.content)])].join("\n").toLowerCase();
  return sample.text;
}

function refilter(keep = true) {
  const words = view.query.toLowerCase();
  const inSource = samples.filter((s) => view.source === null || s.source === view.source);
  view.shown = inSource.filter((s) => KINDS[view.kind](s) && (!words || haystack(s).includes(words)));
  for (const button of at("chips").children) {
    const kind = button.dataset.kind;
    button.textContent = `${kind} ${inSource.filter(KINDS[kind]).length}`;
    button.setAttribute("aria-pressed", String(kind === view.kind));
  }
  drawList();
  if (!keep || !view.shown.includes(view.current)) select(view.shown[0] || null);
  else mark();
}

function drawList() {
  const list = at("list");
  list.replaceChildren();
  let group = null;
  for (const sample of view.shown) {
    if (sample.group !== group) {
      group = sample.group;
      const solved = sample.passed === null ? "" : ` · ${group.samples.filter((s) => s.passed).length}/${group.samples.length}`;
      list.append(el("li", { class: "head", title: group.task_id }, `${nameOf(sample.source)}${solved} · ${group.task_id}`));
    }
    const remarks = [
      sample.reward.flags.length ? el("span", { class: "warn", title: sample.reward.flags.join(", ") }, " ⚑") : null,
      sample.malformed_calls ? el("span", { class: "warn", title: `${sample.malformed_calls} malformed calls` }, " ✎") : null,
    ];
    list.append(el("li", { "data-key": sample.key, onclick: () => select(sample) },
      el("span", { class: outcome(sample) }, { pass: "✓", fail: "✗" }[outcome(sample)] || "·"),
      el("span", {}, `trajectory ${sample.index}`, ...remarks, el("small", {}, `  ${rounds(sample)} · ${sample.tokens.length} tok`)),
      el("span", {}, number(sample.reward.total))));
  }
  const { read, embedded, logged, search } = DATA.trajectories;
  const held = search ? `${embedded} of the ${read} trajectories of the whole run with “${search}”`
    : `${embedded} trajectories of ${SOURCES.length} of ${logged} steps and evaluations; python -m launch.report --search=… looks through all`;
  at("list-note").textContent = `${view.shown.length} of ${samples.length} shown. In this page: ${held}. ← → to move.`;
}

const outcome = (sample) => sample.passed === null ? "" : sample.passed ? "pass" : "fail";
const rounds = (sample) => { const n = sample.turns.filter((t) => t.role === "assistant").length; return `${n} turn${n === 1 ? "" : "s"}`; };
const number = (value) => typeof value === "number" ? value.toFixed(2).replace("-", "−") : String(value);

function select(sample, scroll = true) {
  view.current = sample;
  drawTrajectory();
  mark(scroll);
  if (sample) history.replaceState(null, "", "#t=" + encodeURIComponent(sample.key));
}

function mark(scroll = true) {
  for (const item of at("list").children) {
    const chosen = view.current && item.dataset.key === view.current.key;
    item.setAttribute("aria-selected", String(Boolean(chosen)));
    if (chosen && scroll) at("list").scrollTop = Math.max(0, item.offsetTop - at("list").offsetTop - at("list").clientHeight / 2);
  }
}

function move(by) {
  const i = view.shown.indexOf(view.current) + by;
  if (view.shown[i]) select(view.shown[i]);
}

/** Called by the curves: the embedded step nearest to the one clicked. */
function openStep(step) {
  const training = SOURCES.filter((source) => source.step >= 0);
  if (!training.length) return;
  view.source = training.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
  at("source").value = String(SOURCES.indexOf(view.source));
  refilter(false);
  at("reader").scrollIntoView({ behavior: "smooth" });
}

function drawTrajectory() {
  const article = at("trajectory"), sample = view.current;
  article.replaceChildren();
  if (!sample) { article.append(el("p", { class: "empty" }, "No trajectory matches.")); return; }
  const { group } = sample, sampled = sample.logprobs.filter((lp) => typeof lp === "number");
  const mean = sampled.reduce((a, b) => a + b, 0) / (100 * sampled.length || 1);
  const tags = [
    el("span", { class: "tag " + outcome(sample) }, { pass: "passed", fail: "failed" }[outcome(sample)] || "not judged"),
    el("span", { class: "tag" }, sample.status.replaceAll("_", " ")),
    KINDS.repaired(sample) ? el("span", { class: "tag pass" }, "repaired after the first edit") : null,
    sample.malformed_calls ? el("span", { class: "tag warn" }, `${sample.malformed_calls} malformed`) : null,
    ...sample.reward.flags.map((flag) => el("span", { class: "tag warn" }, "⚑ " + flag)),
  ];
  article.append(
    el("div", { class: "title" }, el("h3", {}, group.task_id), ...tags, el("span", { class: "spacer" }),
      el("button", { onclick: () => move(-1), title: "previous (←)" }, "←"), el("button", { onclick: () => move(1), title: "next (→)" }, "→")),
    facts({
      from: nameOf(sample.source), group: group.group, trajectory: sample.index, reward: reward(sample.reward),
      tokens: `${group.prompt_tokens} + ${sample.tokens.length}`, "mean log p": sampled.length ? number(mean) : "not on record",
      ...Object.fromEntries(Object.entries(sample.seconds).map(([k, v]) => [k, seconds(v)])),
      ...Object.fromEntries(Object.entries(group.task.meta).filter(([, v]) => typeof v !== "object").slice(0, 6)),
    }),
    toolbar(),
    turn("prompt", `${group.prompt_tokens} tokens`, "prompt", el("pre", { class: "block" }, group.prompt), reference(group)));
  const contexts = sample.contexts || [{ start: 0 }];
  let assistant = 0, calls = [], opened = 0;
  const openUpTo = (index) => { while (opened <= index) article.append(...opening(sample, contexts, opened++)); };
  for (const t of sample.turns) {
    openUpTo(t.context || 0);
    if (t.role === "assistant") {
      calls = t.calls;
      const body = view.mode === "tokens" || !t.calls.length ? tokens(sample, t) : el("div", {}, ...t.calls.map(call));
      article.append(turn(`assistant ${++assistant}`, `${t.end - t.start} tokens`, "assistant", body));
    } else if (t.results.length || t.end > t.start) {
      const body = t.end > t.start && (view.mode === "tokens" || !t.results.length) ? tokens(sample, t) : null;
      const shown = t.results.map((r, i) => result(r, calls[i], body !== null));
      article.append(turn("tools", `${t.end - t.start} tokens`, "tools", el("div", { class: body ? "brief" : null }, ...shown), body));
    }
  }
  openUpTo(contexts.length - 1);
}

/** What stands before the turns of a context: of the first one, the prompt beyond what its group shares. */
function opening(sample, contexts, index) {
  const { start, parent, kept } = contexts[index];
  const next = index + 1 < contexts.length ? contexts[index + 1].start : sample.tokens.length;
  const first = sample.turns.find((t) => (t.context || 0) === index);
  const given = { start, end: first ? first.start : next };
  const about = `${given.end - start} tokens${index ? "" : " of its own"}`;
  const body = view.mode === "tokens" ? tokens(sample, given) : el("pre", { class: "block" }, textOf(sample, start, given.end));
  const prompt = given.end > start ? [turn("prompt", about, "prompt", body)] : [];
  if (index === 0) return prompt;
  const from = parent < 0 ? "begins with a prompt of its own" : `begins with the first ${kept} tokens of context ${parent}`;
  return [el("h4", { class: "context" }, `context ${index}`, el("small", {}, from)), ...prompt];
}

function facts(entries) {
  return el("div", { class: "facts" }, ...Object.entries(entries).map(([name, value]) => el("span", {}, name + " ", el("b", {}, String(value)))));
}

function reward({ total, components }) {
  const parts = Object.entries(components).filter(([, value]) => value !== 0).map(([name, value]) => `${name} ${number(value)}`);
  return number(total) + (parts.length ? ` (${parts.join(", ")})` : "");
}

function toolbar() {
  const button = (mode, text) => el("button", { "aria-pressed": String(view.mode === mode), onclick: () => { view.mode = mode; drawTrajectory(); } }, text);
  return el("div", { class: "bar" }, button("calls", "calls and results"), button("tokens", "tokens"),
    ...(view.mode === "tokens" ? [el("span", {}, "log p of sampled tokens: 0"), el("span", { class: "scale" }), el("span", {}, `≤ −${DARKEST / 100}`)] : []));
}

const turn = (who, about, kind, ...body) =>
  el("div", { class: "turn " + kind }, el("div", { class: "who" }, el("b", {}, who), about), el("div", {}, ...body.filter(Boolean)));

function reference(group) {
  const files = Object.entries(group.task.reference);
  return files.length ? el("details", {}, el("summary", {}, "reference solution"),
    ...files.map(([path, text]) => el("div", {}, el("small", {}, path), el("pre", { class: "block" }, text)))) : null;
}

function tokens(sample, t) {
  const box = el("div", { class: "tokens" });
  for (let i = t.start; i < t.end; i++) {
    const [, text] = TOKENS[sample.tokens[i]], logprob = sample.logprobs[i];
    const span = el("span", { "data-i": i }, text);
    if (/^<\|[^|]*\|>$/.test(text)) span.classList.add("special");
    if (logprob === null) span.classList.add("given");
    if (documentOf(sample, i) > 0) span.classList.add("document");
    if (typeof logprob === "number") span.style.background = `rgba(var(--heat), ${(0.75 * Math.min(1, -logprob / DARKEST)).toFixed(3)})`;
    box.append(span);
  }
  return box;
}

function describe(sample, i) {
  const [id, text] = TOKENS[sample.tokens[i]], logprob = sample.logprobs[i];
  const lines = [JSON.stringify(text), `token ${id}`];
  const inside = documentOf(sample, i);
  if (inside) lines.push(inside > 0 ? `document ${inside}` : "padding");
  if (logprob === null) return [...lines, "not sampled"].join("\n");
  const value = typeof logprob === "number" ? logprob / 100 : NaN;
  lines.push(`log p ${value.toFixed(2).replace("-", "−")}   p ${Math.exp(value).toPrecision(2)}`, `weights ${version(sample, i)}`);
  return lines.join("\n");
}

// the value at index i of [value, count] pairs
function valueAt(runs, i) {
  for (const [value, count] of runs) { if (i < count) return value; i -= count; }
}

function version(sample, i) { return valueAt(sample.versions, i); }

// the number of the document that a token stands in; 0 outside of documents, -1 for padding
function documentOf(sample, i) { return sample.documents ? valueAt(sample.documents, i) : 0; }

const seconds = (value) => value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;

function call(c) {
  const short = Object.entries(c.arguments).filter(([, v]) => !String(v).includes("\n")).map(([k, v]) => `${k}=${typeof v === "string" ? v : JSON.stringify(v)}`);
  const long = Object.entries(c.arguments).filter(([, v]) => String(v).includes("\n"));
  return el("div", { class: "call" }, el("header", {}, el("b", {}, c.name || "(no name)"), el("span", {}, short.join("  ")), c.error ? el("span", { class: "warn" }, c.error) : null),
    ...(c.diff ? [difference(c.diff)] : long.map(([k, v]) => el("div", {}, long.length > 1 ? el("small", {}, k) : null, el("pre", { class: "block" }, String(v))))));
}

/** Lines of a unified diff, coloured. */
function difference(lines) {
  const kinds = { "+": "plus", "-": "minus", "@": "hunk" };
  return el("pre", { class: "block diff" }, ...lines.map((line) => el("span", { class: kinds[line[0]] || null }, line)));
}

function result(r, of, brief) {
  const name = r.name || (of && of.name) || "(no name)";
  return el("div", { class: "result" },
    el("header", {}, el("b", {}, name), el("span", { class: r.ok ? "pass" : "warn" }, r.ok ? "ok" : "refused"), el("span", {}, seconds(r.seconds))),
    brief ? null : el("pre", { class: "block" }, r.content));
}

function start() {
  document.querySelector(".reader").hidden = false;
  if (!samples.length) {
    document.querySelector(".reader").replaceWith(el("p", { class: "empty" }, "No trajectory has been logged."));
    return;
  }
  at("source").append(el("option", { value: "" }, "all steps and evaluations"), ...SOURCES.map((source, i) => el("option", { value: i }, nameOf(source))));
  at("chips").append(...Object.keys(KINDS).map((kind) => el("button", { "data-kind": kind, onclick: () => { view.kind = kind; refilter(false); } })));
  at("source").addEventListener("change", (event) => { view.source = event.target.value === "" ? null : SOURCES[Number(event.target.value)]; refilter(false); });
  at("search").addEventListener("input", (event) => { view.query = event.target.value; refilter(); });
  addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    move(by);
  });
  const article = at("trajectory");
  article.addEventListener("pointerover", (event) => { const i = event.target.dataset.i; showTip(i === undefined ? null : describe(view.current, Number(i))); });
  article.addEventListener("pointerleave", () => showTip(null));
  const asked = samples.find((s) => "#t=" + encodeURIComponent(s.key) === location.hash);
  view.current = asked || samples[samples.length - 1];
  refilter();
  drawTrajectory();
  if (asked) at("reader").scrollIntoView();
}

drawCurves();
start();

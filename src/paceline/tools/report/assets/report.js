"use strict";
// Draws the page from the JSON in #data. Text goes in as text, never as HTML.

const { runs, charts: chartsToDraw } = JSON.parse(document.getElementById("data").textContent);
const areSeveral = runs.length > 1;
const COLOURS = 8;
const redraws = []; // functions that draw on a canvas, called when its width or the colour scheme changes
let axis = "step";

// --- text and elements ----------------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  return size > 0 && size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(5)));
}

function duration(seconds) {
  if (seconds < 100) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)} h`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (place) => `--c${place % COLOURS}`;
const swatch = (place) => el("i", { class: "swatch", style: `background: var(${colourOf(place)})` });
const short = (sha) => (sha ? el("code", { title: sha }, sha.slice(0, 12)) : "–");
const union = (lists) => [...new Set(lists.flat())];

function table(head, rows, kind) {
  const cell = (tag) => (content, n) => el(tag, head[n]?.isNumber ? { class: "number" } : {}, content);
  const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td")))));
  const top = el("thead", {}, el("tr", {}, ...head.map(({ title }, n) => cell("th")(title, n))));
  return el("div", { class: "wide" }, el("table", { class: kind ?? "" }, top, body));
}

// --- the head of the page -------------------------------------------------------------------------------------------

function headOf(run) {
  const began = run.began === null ? [] : [new Date(run.began * 1000).toLocaleString("sv-SE")];
  const ranks = run.ranks === 1 ? "1 rank" : `${run.ranks} ranks`;
  const words = [run.label, run.state, ...began, ranks, `${shown(run.step)} steps`, duration(run.seconds)];
  const figures = [
    ...Object.entries(run.metrics).map(([name, value]) => [name, shown(value)]),
    ["samples per second, median", shown(run.samples_per_s === null ? null : Math.round(run.samples_per_s))],
    ["weights", short(run.weights_sha256)],
  ];
  return [
    el("h1", {}, run.name),
    el("p", { class: "sub" }, words.join(" · ")),
    el("dl", { class: "figures" }, ...figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
  ];
}

function comparison() {
  const metrics = union(runs.map((run) => Object.keys(run.metrics)));
  const number = (title) => ({ title, isNumber: true });
  const head = [
    { title: "run" }, { title: "state" }, number("ranks"), number("steps"), number("time"), number("samples/s"),
    ...metrics.map(number), { title: "weights" },
  ];
  const rows = runs.map((run, place) => [
    el("span", {}, swatch(place), run.label), run.state, shown(run.ranks), shown(run.step), duration(run.seconds),
    shown(run.samples_per_s === null ? null : Math.round(run.samples_per_s)),
    ...metrics.map((name) => shown(run.metrics[name])), short(run.weights_sha256),
  ]);
  return [
    el("h1", {}, union(runs.map((run) => run.name)).join(", ")),
    el("p", { class: "sub" }, `${runs.length} runs · ${sameness()}`),
    table(head, rows, "runs"),
    ...differences(),
  ];
}

function sameness() {
  const hashes = union(runs.map((run) => run.weights_sha256)).filter((hash) => hash !== null);
  const groups = hashes.map((hash) => runs.filter((run) => run.weights_sha256 === hash)).filter((group) => group.length > 1);
  if (!groups.length) return "all have different weights";
  const words = groups.map((group) => (group.length === runs.length ? "all" : group.map((run) => run.label).join(", ")));
  return `bitwise identical weights: ${words.join("; ")}`;
}

function differences() {
  const keys = union(runs.map((run) => Object.keys(run.settings)));
  const differing = keys.filter((key) => key !== "run_dir" && new Set(runs.map((run) => shownKey(run, key))).size > 1);
  if (!differing.length) return [el("p", { class: "muted" }, "The configs are identical.")];
  const head = [{ title: "key" }, ...runs.map((run) => ({ title: run.label, isNumber: true }))];
  const rows = differing.map((key) => [el("code", {}, key), ...runs.map((run) => shownKey(run, key))]);
  return [el("h2", {}, "Config"), table(head, rows)];
}

const shownKey = (run, key) => (key in run.settings ? String(run.settings[key]) : "–");

// --- curves ---------------------------------------------------------------------------------------------------------

function linesOf(names) {
  return names.flatMap((name, n) =>
    runs.flatMap((run, place) => {
      const curve = run.curves[name];
      if (!curve) return [];
      const label = !areSeveral ? name : names.length > 1 ? `${run.label} ${name}` : run.label;
      return [{ curve, label, colour: colourOf(areSeveral ? place : n), isDashed: areSeveral && n > 0 }];
    })
  );
}

function draw(box, names, isLog) {
  const lines = linesOf(names);
  const data = uPlot.join(lines.map(({ curve }) => [curve[axis], curve.value]));
  const last = data.map((column) => column.findLast((value) => value !== null && value !== undefined));
  const inWords = (value) => (axis === "step" ? shown(value) : duration(value));
  const options = {
    width: box.clientWidth, height: 220,
    cursor: { y: false, sync: { key: "page", scales: ["x", null] }, points: { size: 7 } },
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
    axes: [axisOf({ values: (u, ticks) => ticks.map(inWords), space: 70, size: 30 }), axisOf({ values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))), size: 62 }, isLog)],
    series: [
      { label: axis === "step" ? "step" : "time", value: (u, value) => inWords(value ?? last[0]) },
      ...lines.map(({ curve, label, colour, isDashed }, n) => ({
        label, stroke: () => css(colour), width: 1.5, spanGaps: true, dash: isDashed ? [5, 4] : undefined,
        points: { show: curve.value.length < 40 || curve.per === "epoch" && curve.value.length < 120, size: 4 },
        value: (u, value) => shown(value ?? last[n + 1]),
      })),
    ],
    hooks: { drawAxes: [drawStarts] },
  };
  const plot = new uPlot(options, data, box);
  return () => (plot.width === box.clientWidth ? plot.redraw() : plot.setSize({ width: box.clientWidth, height: 220 }));
}

/** A chart with its title, and a button for a logarithmic scale where values differ by a factor over 50. */
function chart(title, names) {
  const box = el("div"), head = el("h3", {}, title);
  const values = linesOf(names).flatMap(({ curve }) => curve.value);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  let isLog = false, redraw = () => {};
  const fill = () => { box.replaceChildren(); redraw = draw(box, names, isLog); };
  if (low > 0 && high > 50 * low) {
    const button = el("button", { type: "button", "aria-pressed": false }, "log");
    button.onclick = () => { isLog = !isLog; button.setAttribute("aria-pressed", isLog); fill(); };
    head.append(button);
  }
  return { element: el("section", {}, head, box), fill, redraw: () => redraw() };
}

function axisOf(more, isLog = false) {
  const isPower = (tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9;
  const filter = isLog ? (u, ticks) => ticks.map((tick) => (isPower(tick) ? tick : null)) : undefined;
  const line = { stroke: () => css("--line"), width: 1, ...(filter && { filter }) };
  return { stroke: () => css("--muted"), font: "12px system-ui, sans-serif", grid: line, ticks: { ...line, size: 4 }, ...more };
}

/** Draws a dashed line where the ranks of a run were started again. */
function drawStarts(u) {
  if (areSeveral) return;
  u.ctx.save();
  u.ctx.strokeStyle = css("--warn");
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const attempt of runs[0].attempts.slice(1)) {
    const x = Math.round(u.valToPos(axis === "step" ? attempt.step : attempt.start, "x", true));
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
  }
  u.ctx.restore();
}

function curves() {
  if (!chartsToDraw.length) return [el("h2", {}, "Curves"), el("p", { class: "muted" }, "No metrics were logged: the run ended too early, or its own loop does not log.")];
  const drawn = chartsToDraw.map(({ title, names }) => chart(title, names));
  const fill = () => drawn.forEach((one) => one.fill());
  redraws.push(...drawn.map((one) => one.redraw));
  const buttons = ["step", "seconds"].map((name) => {
    const button = el("button", { type: "button", "aria-pressed": name === axis }, name === "step" ? "steps" : "time");
    button.onclick = () => { axis = name; buttons.forEach((b) => b.setAttribute("aria-pressed", b === button)); fill(); };
    return button;
  });
  requestAnimationFrame(fill);
  return [
    el("h2", {}, "Curves"),
    el("div", { class: "axis" }, "over ", ...buttons),
    el("div", { class: "charts" }, ...drawn.map((one) => one.element)),
    el("p", { class: "note" }, "Hover over a curve to see its values, drag to zoom, double-click to reset."),
  ];
}

// --- ranks ----------------------------------------------------------------------------------------------------------

function ranksOf(run) {
  const { heat } = run;
  if (!heat) return [];
  const rows = Math.max(...heat.columns.map((column) => column.length));
  const height = rows * (rows <= 8 ? 18 : rows <= 32 ? 9 : Math.max(2, Math.floor(300 / rows)));
  const canvas = el("canvas", { style: `height: ${height}px` });
  const output = el("output", {}, "");
  const sorted = heat.columns.flat().sort((a, b) => a - b);
  const low = sorted[Math.floor(0.02 * sorted.length)], high = sorted[Math.floor(0.98 * sorted.length)];
  const scale = `light: ${shown(low)} ms, dark: ${shown(high)} ms`;
  const strip = () => paint(canvas, heat, rows, height, (ms) => Math.min(1, Math.max(0, (ms - low) / (high - low || 1))));
  redraws.push(strip);
  requestAnimationFrame(strip);
  output.textContent = scale;
  canvas.onmousemove = (event) => {
    const column = Math.min(heat.steps.length - 1, Math.floor((event.offsetX / canvas.clientWidth) * heat.steps.length));
    const rank = Math.min(rows - 1, Math.floor((event.offsetY / height) * rows));
    const isSlow = heat.stragglers[column].includes(rank) ? ", a straggler" : "";
    output.textContent = `step ${shown(heat.steps[column])}, rank ${rank}: ${shown(heat.columns[column][rank])} ms${isSlow}`;
  };
  canvas.onmouseleave = () => { output.textContent = scale; };
  const ranks = el("div", { class: "ranks" }, el("span", {}, "rank 0"), rows > 1 ? el("span", {}, rows > 2 ? rows - 1 : 1) : null);
  return [el("h2", {}, "Step times of the ranks"), el("div", { class: "strip" }, ranks, canvas, output), el("p", {}, ...stragglers(heat, rows))];
}

function paint(canvas, heat, rows, height, strength) {
  const width = canvas.clientWidth, ratio = devicePixelRatio;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const ctx = canvas.getContext("2d"), wide = canvas.width / heat.columns.length, high = canvas.height / rows;
  const gap = high > 6 ? ratio : 0;
  const [usual, slow] = [css("--c0"), css("--warn")];
  heat.columns.forEach((column, n) => {
    const left = Math.round(n * wide), right = Math.round((n + 1) * wide);
    column.forEach((ms, rank) => {
      const isSlow = heat.stragglers[n].includes(rank);
      ctx.fillStyle = isSlow ? slow : usual;
      ctx.globalAlpha = isSlow ? 1 : 0.08 + 0.87 * strength(ms);
      ctx.fillRect(left, Math.round(rank * high), right - left, Math.round((rank + 1) * high) - Math.round(rank * high) - gap);
    });
  });
}

function stragglers(heat, rows) {
  if (rows === 1) return ["A single rank does not wait for others."];
  const found = Object.entries(heat.slow_points).sort((a, b) => b[1] - a[1]);
  const wait = "On a CPU the times exclude waiting for other ranks; on a GPU they are those of whole steps and include it.";
  if (!found.length) return [`No rank took longer than 1.25 times the median of all. ${wait}`];
  const words = found.slice(0, 4).map(([rank, count]) => `rank ${rank} at ${shown(count)}`).join(", ");
  return [el("i", { class: "key" }), `longer than 1.25 times the median of all ranks: ${words} of ${shown(heat.points)} points. ${wait}`];
}

// --- where a step spends its time ----------------------------------------------------------------------------------

const WORDS = {
  data: "waiting for data", reduction: "summing over all ranks", other: "logging, saving and the rest",
  device: "everything else, on the GPU",
};

function phasesOf(run) {
  if (!run.phases) return [];
  const { names, ms } = run.phases, ranks = ms[0].map((_, rank) => rank);
  const totals = ranks.map((rank) => ms.reduce((sum, times) => sum + times[rank], 0));
  const longest = Math.max(...totals), whole = totals.reduce((a, b) => a + b, 0);
  const bars = ranks.map((rank) =>
    el("div", { class: "bar", style: `height: ${ranks.length <= 8 ? 18 : 6}px` }, ...names.map((name, n) =>
      el("i", { style: `width: ${(100 * ms[n][rank]) / (longest || 1)}%; background: var(${colourOf(n)})`, title: `rank ${rank}: ${name} ${shown(ms[n][rank])} ms` })
    ))
  );
  const labels = el("div", { class: "ranks" }, el("span", {}, "rank 0"), ranks.length > 1 ? el("span", {}, ranks.length - 1) : null);
  const rows = names.map((name, n) => {
    const sum = ms[n].reduce((a, b) => a + b, 0), share = `${((100 * sum) / (whole || 1)).toFixed(1)} %`;
    return [el("span", {}, swatch(n), name), WORDS[name] ?? "", shown(sum / ranks.length), share];
  });
  const head = [{ title: "phase" }, { title: "" }, { title: "ms, mean of the ranks", isNumber: true }, { title: "share", isNumber: true }];
  return [el("h2", {}, "Where a step spends its time"), el("div", { class: "strip" }, labels, el("div", {}, ...bars)), table(head, rows, "phases")];
}

// --- the plan -------------------------------------------------------------------------------------------------------

function plannedOf(run) {
  if (!run.planned) return [];
  const { rows, remark } = run.planned;
  const head = [{ title: "" }, { title: "planned", isNumber: true }, { title: "actual, median", isNumber: true }];
  return [
    el("h2", {}, "Plan"), rows.length ? table(head, rows, "planned") : null, remark ? el("p", { class: "muted" }, remark) : null,
  ].filter((part) => part !== null);
}

// --- the time line and the details of the run ------------------------------------------------------------------------------------

function timeLine(run) {
  if (!run.attempts.length) return [];
  const at = (seconds) => `${(100 * seconds) / (run.seconds || 1)}%`;
  const attempts = run.attempts.map((attempt) =>
    el("i", { class: "attempt", style: `left: ${at(attempt.start)}; width: ${at(attempt.end - attempt.start)}`, title: `${attempt.ranks} ranks, from step ${attempt.step}` })
  );
  const marks = run.marks.map((mark) =>
    el("i", { class: `mark ${mark.kind}`, style: `left: ${at(mark.seconds)}`, title: inWords(mark) })
  );
  const kinds = union(run.marks.map((mark) => mark.kind)).filter((kind) => kind !== "resumed");
  const legend = kinds.map((kind) => el("span", {}, el("i", { class: `mark ${kind}` }), kind));
  const rows = run.marks.map((mark) => [duration(mark.seconds), shown(mark.step), mark.kind, mark.text]);
  const head = [{ title: "time", isNumber: true }, { title: "step", isNumber: true }, { title: "event" }, { title: "" }];
  return [
    el("h2", {}, "Time line"),
    el("div", { class: "line" }, ...attempts, ...marks),
    el("div", { class: "ends" }, el("span", {}, "0 s"), el("span", {}, duration(run.seconds))),
    el("div", { class: "legend" }, ...legend),
    el("details", {}, el("summary", {}, run.marks.length === 1 ? "1 event" : `${run.marks.length} events`), table(head, rows, "marks")),
  ];
}

function inWords(mark) {
  const step = mark.step === null ? "" : `, step ${shown(mark.step)}`;
  return `${mark.kind}${step}, ${duration(mark.seconds)}${mark.text ? `: ${mark.text}` : ""}`;
}

function whatRan(run) {
  const rows = run.about.map(([name, text]) => el("tr", {}, el("th", {}, name), el("td", {}, text)));
  return [
    el("h2", {}, "Run details"),
    el("table", { class: "facts" }, el("tbody", {}, ...rows)),
    el("details", {}, el("summary", {}, "config.yaml"), el("pre", {}, run.config)),
  ];
}

const partsOf = (run) => [...ranksOf(run), ...phasesOf(run), ...plannedOf(run), ...timeLine(run), ...whatRan(run)];

function runsOneByOne() {
  return runs.map((run, place) => {
    const box = el("details", { class: "run" }, el("summary", {}, swatch(place), run.label), ...partsOf(run));
    box.ontoggle = redrawAll; // a closed box has no width
    return box;
  });
}

// --- the page -------------------------------------------------------------------------------------------------------

function redrawAll() {
  redraws.forEach((redraw) => redraw());
}

const page = document.getElementById("page");
if (areSeveral) page.append(...comparison(), ...curves(), el("h2", {}, "Each run"), ...runsOneByOne());
else page.append(...headOf(runs[0]), ...curves(), ...partsOf(runs[0]));
page.append(el("footer", {}, "Written by paceline report from events.jsonl. Curves by uPlot."));
addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

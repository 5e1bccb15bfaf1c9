"use strict";
const one = (query, within = document) => within.querySelector(query);
const all = (query, within = document) => [...within.querySelectorAll(query)];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const short = value => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e3) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
};

// ---- streams: one at a time, and none while nobody looks (browsers allow six connections to a server)
let stream = null;
function follow(address, read) {
  const open = () => {
    stream?.close();
    stream = document.hidden ? null : new EventSource(address());
    if (stream) stream.onmessage = event => read(JSON.parse(event.data));
  };
  document.onvisibilitychange = open;
  open();
}

// ---- the charts of one run or of several: a title, a unit, columns with their names, what was predicted
const FIGURES = [
  { title: "Loss", columns: { loss: "training", eval_loss: "held out" } },
  { title: "Gradient norm", columns: { grad_norm: "before clipping" } },
  { title: "Learning rate", columns: { learning_rate: "learning rate" } },
  { title: "Tokens a second", columns: { tokens_per_second: "all together" }, level: run => run.predicted.tokens_per_second_per_gpu * run.processes },
  { title: "Memory", unit: " GiB", columns: { memory_gib: "reserved at most, worst rank" }, level: run => run.predicted.peak_memory_reserved_bytes / 2 ** 30 },
  { title: "Power", unit: " W", columns: { watts: "all GPUs" } },
];
const POINTS = 4000; // of live curves: more are asked for again, and the server thins them out
const holder = one("[data-of]");
const names = holder ? JSON.parse(holder.dataset.of) : [];
let view = null, runs = [], charts = []; // view: [first step, last step] of the zoom
const ends = () => {
  const x = runs.flatMap(run => Object.values(run?.curves ?? {}).flatMap(curve => [curve.x[0], curve.x.at(-1)]));
  return x.length ? [Math.min(...x), Math.max(...x)] : [0, 1];
};

function lines(figure) {
  const found = [];
  for (const [place, run] of runs.entries()) {
    for (const [column, words] of Object.entries(figure.columns)) {
      const curve = run?.curves[column], held = column === "eval_loss", several = names.length > 1;
      if (!curve) continue;
      const name = several ? names[place] + (held ? ", held out" : "") : words;
      found.push({ name, curve, dots: held, dashed: several && held, stroke: colour(several ? `s${place % 8}` : held ? "s1" : "measured") });
    }
    const level = figure.level?.(run ?? { predicted: {} });
    if (found.length && names.length === 1 && Number.isFinite(level)) found.push({ name: "predicted", curve: { x: ends(), y: [level, level] }, dashed: true, stroke: colour("accent") });
  }
  return found;
}
const data = found => found.length > 1 ? uPlot.join(found.map(line => [line.curve.x, line.curve.y]), found.map(() => [1, 2])) : [found[0].curve.x, found[0].curve.y];

function draw(figure) {
  const found = lines(figure), unit = figure.unit ?? "";
  if (!found.length) return null;
  const card = document.createElement("figure"), place = document.createElement("div");
  card.className = "card";
  card.innerHTML = `<figcaption><h3>${figure.title}</h3><p class="caption"></p></figcaption>`;
  Object.assign(place, { className: "plot-area", tabIndex: 0, role: "group", ariaLabel: `${figure.title} by step, a chart` });
  card.append(place);
  holder.append(card);
  const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const plot = new uPlot({
    width: place.clientWidth,
    height: 220,
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoom(null) } },
    scales: { x: { time: false, range: () => view ?? ends() } },
    axes: [
      { ...axis, size: 30, values: (_, marks) => marks.map(mark => mark % 1 ? "" : mark.toLocaleString("en")) },
      { ...axis, size: 64, values: (_, marks) => marks.map(mark => short(mark) + unit) },
    ],
    series: [
      { label: "step", value: (_, step) => step?.toLocaleString("en") ?? "" },
      ...found.map(line => ({
        label: line.name,
        stroke: line.stroke,
        width: 1.75,
        dash: line.dashed ? [5, 4] : undefined,
        points: { show: !!line.dots, size: 5, fill: line.stroke },
        spanGaps: found.length > 1,
        value: (_, value) => value == null ? "" : short(value) + unit,
      })),
    ],
    hooks: { setSelect: [plot => plot.select.width > 4 && zoom([0, plot.select.width].map(x => plot.posToVal(plot.select.left + x, "x")))] },
  }, data(found), place);
  place.onkeydown = event => key(event, plot);
  new ResizeObserver(() => plot.width !== place.clientWidth && plot.setSize({ width: place.clientWidth, height: 220 })).observe(place);
  const chart = { figure, plot, count: found.length, caption: one(".caption", card), unit };
  summary(chart, found);
  return chart;
}
function summary({ caption, unit }, found) {
  const values = found[0].curve.y.filter(value => value != null);
  if (names.length === 1 && values.length) caption.textContent = `now ${short(values.at(-1))}${unit}, from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
}

function key(event, plot) {
  const steps = plot.data[0], last = steps.length - 1, now = plot.cursor.idx ?? last;
  const quarter = (plot.scales.x.max - plot.scales.x.min) / 4;
  const goes = { ArrowLeft: Math.max(0, now - 1), ArrowRight: Math.min(last, now + 1), Home: 0, End: last }[event.key];
  if (goes !== undefined) plot.setCursor({ left: plot.valToPos(steps[goes], "x"), top: 20 });
  else if (event.key === "+") zoom([steps[now] - quarter, steps[now] + quarter]);
  else if (event.key === "-" || event.key === "Escape") zoom(null);
  else return;
  event.preventDefault();
}
function redraw() {
  const focused = charts.findIndex(chart => chart?.plot.root.parentNode === document.activeElement);
  for (const chart of charts) chart?.plot.destroy();
  holder.replaceChildren();
  charts = FIGURES.map(draw);
  one("#waiting").textContent = "no step is done yet";
  one("#waiting").hidden = charts.some(Boolean);
  charts[focused]?.plot.root.parentNode.focus();
}
function update() {
  if (FIGURES.some((figure, place) => lines(figure).length !== (charts[place]?.count ?? 0))) return redraw();
  for (const chart of charts.filter(Boolean)) {
    const found = lines(chart.figure);
    chart.plot.setData(data(found));
    summary(chart, found);
  }
}
function zoom(range) {
  view = range && [Math.max(ends()[0], range[0]), Math.min(ends()[1], range[1])];
  one("#all-steps").hidden = !view;
  watch();
}
function watch() {
  const asked = new URLSearchParams(names.map(name => ["of", name]));
  if (view) { asked.set("first", view[0]); asked.set("last", view[1]); }
  follow(() => `/live?${asked}`, news);
}

function news(event) {
  let again = false, fresh = false;
  for (const [place, run] of Object.entries(event)) {
    for (const facts of all(`[data-place="${place}"]`)) facts.innerHTML = run.facts;
    if (run.all) { runs[place] = run; fresh = true; continue; }
    for (const [column, { x, y }] of Object.entries(run.curves)) {
      const curve = runs[place].curves[column] ??= { x: [], y: [] };
      curve.x.push(...x), curve.y.push(...y);
      again ||= curve.x.length > POINTS;
    }
  }
  if (again) watch(); else if (fresh) redraw(); else if (!view) update();
}

if (holder) {
  one("#all-steps").onclick = () => zoom(null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  watch();
}

// ---- the list of runs: cells that changed, rows that are new; what is chosen or has the focus stays
if (one("[data-live=list]")) {
  follow(() => "/live", event => {
    const body = one("[data-live=list] tbody"), holder = document.createElement("tbody");
    holder.innerHTML = event.rows;
    const before = new Map(all("tr", body).map(row => [row.dataset.key, row]));
    for (const [place, row] of all("tr", holder).entries()) {
      const old = before.get(row.dataset.key);
      before.delete(row.dataset.key);
      if (old) all("td", row).forEach((cell, n) => { if (old.cells[n + 1].innerHTML !== cell.innerHTML) old.cells[n + 1].replaceWith(cell); });
      const shown = old ?? row;
      if (body.rows[place] !== shown) body.insertBefore(shown, body.rows[place] ?? null);
    }
    for (const gone of before.values()) gone.remove();
  });
}

// ---- forms
function show(html) {
  one("#result").innerHTML = html;
  one("#result").focus({ preventScroll: true });
  one("#result").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}
function say(text, bad = false) {
  one("#status").textContent = text;
  one("#status").classList.toggle("error", bad);
}
const sent = (values, more = {}) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(values), ...more });

async function plan(form, signal) {
  const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  for (const name of ["rank", "sequence", "global_batch"]) if (values[name]) values[name] = Number(values[name]);
  const answer = await fetch("/plan", sent(values, { signal }));
  if (!answer.ok) return say(await answer.text(), true);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const began = Date.now(), progress = one("#progress");
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines.map(JSON.parse)) {
      if (line.error) return say(line.error, true);
      if (line.html) { say(""); return show(line.html); }
      if (line.strategies) { progress.max = line.strategies; progress.value = line.done; }
      const seconds = Math.round((Date.now() - began) / 1000);
      say(progress.max > 1 ? `${progress.value} of ${progress.max} strategies, ${seconds} s` : `building the model, ${seconds} s`);
    }
  }
}

if (one("#plan")) {
  const form = one("#plan"), cancel = one("#cancel"), progress = one("#progress");
  form.onsubmit = async event => {
    event.preventDefault();
    const ending = new AbortController();
    cancel.onclick = () => ending.abort();
    progress.removeAttribute("value"), progress.max = 1;
    one("button", form).disabled = true;
    cancel.hidden = progress.hidden = false;
    say("starting");
    try { await plan(form, ending.signal); }
    catch (error) { say(error.name === "AbortError" ? "cancelled" : `the board does not answer: ${error.message}`, error.name !== "AbortError"); }
    one("button", form).disabled = false;
    cancel.hidden = progress.hidden = true;
  };
}

if (one("#check")) {
  one("#check").onsubmit = async event => {
    event.preventDefault();
    const form = event.target, files = {};
    for (const file of form.files.files) files[file.name] = await file.text();
    if (form.text.value.trim()) files[form.elements.name.value || "text"] = form.text.value;
    if (!Object.keys(files).length) return say("choose a file, or write a text", true);
    const answer = await fetch("/check", sent({ files }));
    if (!answer.ok) return say(await answer.text(), true);
    say("");
    show(await answer.text());
  };
}

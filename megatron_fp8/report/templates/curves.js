"use strict";
// Charts (Bokeh models, looked up by name): colours, the box at the pointer, and curves over iterations.

// ------------------------------------------------------------------------------------------------- charts

let drawn; // Bokeh's document
/** BokehJS is stored deflated, at a third of its size, and then runs like any script of the page. */
async function loadBokeh() {
  const script = element("script", new TextDecoder().decode(await unpacked(at("bokeh").textContent)));
  document.head.append(script);
  Bokeh.set_log_level("error");
  drawn = Bokeh.require("document").Document.from_json(models);
}

const model = (name) => drawn.get_model_by_name(name);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Shaded phases of a run, in all charts. */
const bands = (run) => drawn.roots().flatMap((chart) => chart.center.filter((part) => part.name === `phase/${run}`));

/** Colours of the light or dark scheme, which may change while the page is open. */
function paint() {
  const ink = css("--soft"), grid = css("--grid");
  for (const chart of drawn.roots()) {
    for (const axis of [...chart.below, ...chart.left]) {
      axis.setv({
        axis_line_color: ink, major_tick_line_color: ink, minor_tick_line_color: null,
        major_label_text_color: ink, axis_label_text_color: ink, axis_label_text_font_style: "normal",
      });
    }
    for (const lines of chart.center.filter((part) => part.type === "Grid")) lines.setv({ grid_line_color: grid });
    for (const renderer of chart.renderers) {
      const [kind, ...rest] = (renderer.name ?? "").split("/");
      if (kind === "box") renderer.glyph.line_color = { value: css("--box") };
      if (kind !== "color") continue;
      const colour = { value: css(`--run-${Number(rest.at(-1)) % 6}`) };
      renderer.glyph.line_color = colour;
      if (renderer.glyph.fill_color !== undefined) renderer.glyph.fill_color = colour;
    }
  }
  runs.forEach((_, i) => {
    for (const band of bands(i)) band.setv({ fill_color: css(`--run-${i % 6}`), line_color: null });
  });
}

/** Bokeh's canvases would take the keyboard focus without use: the form's fields offer the same functions. */
function unreachable(place) {
  for (const part of place.querySelectorAll("*")) {
    if (part.tabIndex >= 0) part.tabIndex = -1;
    if (part.shadowRoot) unreachable(part.shadowRoot);
  }
}

/** Marks over the middle of ranges [first, last, ...]. */
function marks(source, stretches, height) {
  const x = stretches.map(([first, last]) => (first + last) / 2);
  source.data = { x, y: x.map(() => height) };
}

/** A box next to the pointer; no box without text. */
const pointer = { x: 0, y: 0 };
document.addEventListener("pointermove", (event) => { pointer.x = event.clientX; pointer.y = event.clientY; }, true);
function tip(texts) {
  const box = at("tip");
  box.hidden = !texts.length;
  box.replaceChildren(...texts.map((text) => element("div", text)));
  const below = pointer.y + 16, fits = below + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(4, Math.min(pointer.x + 14, innerWidth - box.offsetWidth - 20))}px`;
  box.style.top = `${fits ? below : pointer.y - box.offsetHeight - 10}px`;
}

/** Index of the value nearest to `wanted` in increasing values. */
function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

const hidden = () => new Set([...document.querySelectorAll(".shows:not(:checked)")].map((box) => Number(box.value)));

/** Box of a curve chart: every run's value at the pointer, and nearby marks. */
function pointedCurve(event) {
  const chart = event.origin, per = (chart.x_range.end - chart.x_range.start) / (chart.inner_width || 300);
  const near = (first, last) => first - 7 * per <= event.x && event.x <= last + 7 * per;
  const texts = [];
  runs.forEach((run, i) => {
    const curve = chart.name === "site" ? shown.series[i] : curves[i][chart.name];
    if (!curve?.x.length || hidden().has(i)) return;
    const name = runs.length > 1 ? `${run.name}: ` : "", k = nearest(curve.x, event.x);
    const gap = curve.gaps.find(([first, last]) => first <= curve.x[k] && curve.x[k] <= last);
    if (!texts.length) texts.push(`iteration ${curve.x[k]}`);
    texts.push(name + (gap ? gap[2] : told(curve.y[k])));
    if (chart.name !== "lm_loss") return;
    const checked = curves[i].validation_loss;
    const v = checked ? nearest(checked.x, event.x) : 0;
    if (checked && near(checked.x[v], checked.x[v])) texts.push(`${name}validation ${told(checked.y[v])}`);
    for (const [first, last, kind, text] of run.events) {
      if (near(first, last)) texts.push(`${name}${kind}, iteration ${first}: ${text}`.slice(0, 200));
    }
  });
  return texts.slice(0, 12);
}

const curves = [];
async function fillCurves() {
  for (const [i, run] of runs.entries()) {
    curves[i] = {};
    await Promise.all(Object.entries(run.curves).map(async ([name, curve]) => {
      const x = await iterationsOf(curve.x), y = new Float32Array(await unpacked(curve.y));
      curves[i][name] = { x, y, gaps: curve.gaps };
      const source = model(`${name}/${i}`);
      if (source) source.data = { x, y };
      const crosses = model(`gaps/${name}/${i}`);
      if (crosses) marks(crosses, curve.gaps, GAPS_AT);
    }));
    const events = model(`events/${i}`);
    if (events) marks(events, run.events, EVENTS_AT);
  }
}

/** Iteration range of all curve charts. */
function look(from, to) {
  const range = model("iterations");
  range.setv({ start: from, end: Math.max(to, from + 1) });
}

function followCurves() {
  const range = model("iterations");
  if (!range) return;
  const last = Math.max(1, ...runs.map((run) => run.last));
  const whole = () => look(Math.min(1, last - 1) - 0.4, last + 0.4);
  const from = at("from"), to = at("to");
  range.change.connect(() => {
    if (document.activeElement !== from) from.value = Math.max(0, Math.round(range.start));
    if (document.activeElement !== to) to.value = Math.round(range.end);
    tableOfCurves();
  });
  for (const input of [from, to]) {
    input.addEventListener("change", () => look(Number(from.value), Number(to.value)));
  }
  at("whole").addEventListener("click", whole);
  drawn.on_event("doubletap", (_, event) => event.origin?.x_range === range && whole());
  for (const box of document.querySelectorAll(".shows")) {
    box.addEventListener("change", () => {
      for (const chart of drawn.roots()) {
        for (const renderer of chart.renderers) {
          const [kind, ...rest] = (renderer.name ?? "").split("/");
          if (kind === "color" && rest.at(-1) === box.value) renderer.visible = box.checked;
        }
      }
      for (const band of bands(box.value)) band.visible = box.checked;
      tableOfCurves();
    });
  }
  at("range").addEventListener("submit", (event) => event.preventDefault());
  at("curves-table").addEventListener("toggle", tableOfCurves);
  whole();
}

function tableOfCurves() {
  if (!at("curves-table").open) return;
  const { start, end } = model("iterations");
  const columns = [], unwanted = hidden();
  curves.forEach((run, i) => {
    if (!unwanted.has(i)) for (const name of Object.keys(run)) columns.push([i, name]);
  });
  const rows = new Map();
  columns.forEach(([i, name], column) => {
    const { x, y, gaps } = curves[i][name];
    for (let k = 0; k < x.length; k++) {
      if (x[k] < start || x[k] > end) continue;
      if (!rows.has(x[k])) rows.set(x[k], Array(columns.length).fill(""));
      const gap = Number.isNaN(y[k]) ? gaps.find(([first, last]) => first <= x[k] && x[k] <= last) : undefined;
      rows.get(x[k])[column] = gap ? gap[2] : String(Number(y[k].toPrecision(6)));
    }
  });
  const sorted = [...rows.keys()].sort((a, b) => a - b), step = Math.ceil(sorted.length / ROWS) || 1;
  const titles = columns.map(([i, name]) => (runs.length > 1 ? `${runs[i].name}: ${name}` : name));
  const caption = step > 1 ? `Every ${step}th row; choose fewer iterations above to see all.` : "Every iteration shown in the charts.";
  table(at("curves-table").lastElementChild, caption, ["iteration", ...titles],
    sorted.filter((_, k) => k % step === 0).map((iteration) => [iteration, ...rows.get(iteration)]));
}

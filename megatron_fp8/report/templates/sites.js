"use strict";
// The map of all sites, the chart of one site over iterations, and the fields that select their content.

// -------------------------------------------------------------------------------------------------- sites

const shown = { run: 0, series: [], iterations: [], codes: null, regular: true };
const measured = runs.map((_, i) => i).filter((i) => runs[i].statistics);
const found = () => runs[shown.run].statistics;
const decoded = new Map();

/** A map of a run, or null if the run has none; decoded on first use. */
async function mapOf(run, tensor, statistic) {
  const text = runs[run].statistics?.maps[tensor]?.[statistic];
  if (text === undefined) return null;
  const key = JSON.stringify([run, tensor, statistic]);
  if (!decoded.has(key)) decoded.set(key, await codesOf(text, (await iterationsOf(runs[run].statistics.iterations)).length));
  return decoded.get(key);
}

const columnName = (k) => {
  const { merged } = found(), first = shown.iterations[k], next = shown.iterations[k + 1];
  return merged > 1 && next !== undefined ? `iterations ${first} to ${next - 1} (the most unusual)` : `iteration ${first}`;
};

async function chooseRun() {
  shown.run = measured[at("run").selectedIndex];
  shown.iterations = await iterationsOf(found().iterations);
  const [tensor, site] = [at("tensor").value, at("site").value];
  options(at("tensor"), Object.keys(found().maps), tensor);
  options(at("site"), found().sites, site);
  at("iteration").max = shown.iterations.length - 1;
  at("iteration").value = shown.iterations.length - 1;
  await chooseTensor();
}

async function chooseTensor() {
  const there = Object.keys(found().maps[at("tensor").value]);
  const before = at("statistic").value;
  options(at("statistic"), there, there.includes(before) ? before : data.start.find((name) => there.includes(name)));
  await chooseStatistic();
}

async function chooseStatistic() {
  shown.codes = await mapOf(shown.run, at("tensor").value, at("statistic").value);
  at("meaning").textContent = data.meanings[at("statistic").value] ?? "";
  drawMap();
  await chooseSite();
}

/** The colours of a map, for numbers and for special codes. */
const SPECIAL = { NaN: [230, 0, 126], Infinity: [255, 45, 30], "-Infinity": [255, 150, 0], null: [140, 140, 140] };
const palette = Array.from({ length: data.palette.length / 6 }, (_, i) =>
  [0, 2, 4].map((k) => parseInt(data.palette.slice(6 * i + k, 6 * i + k + 2), 16)));

function drawMap() {
  const { sites } = found(), codes = shown.codes, columns = shown.iterations.length, rows = sites.length;
  tip([]);
  at("pointed").textContent = at("pointed").dataset.asked;
  let least = Infinity, most = -Infinity, leastAbove = Infinity;
  const special = new Map();
  for (const code of codes) {
    const text = inWords(code);
    if (text !== null) { special.set(text, (special.get(text) ?? 0) + 1); continue; }
    const value = valueOf(code);
    least = Math.min(least, value);
    most = Math.max(most, value);
    if (value > 0) leastAbove = Math.min(leastAbove, value);
  }
  const wanted = at("scale").value, possible = most > 0 && least >= 0;
  const log = possible && (wanted === "log" || (wanted === "auto" && most / leastAbove > 100));
  const [low, high] = log ? [Math.log(leastAbove), Math.log(most)] : [least, most];
  const place = (value) => {
    const part = log ? Math.log(Math.max(value, leastAbove)) : value;
    return high > low ? Math.round((part - low) / (high - low) * (palette.length - 1)) : 0;
  };
  const pixels = new Uint32Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    for (let k = 0; k < columns; k++) {
      const code = codes[row * columns + k], text = inWords(code);
      if (text === "not measured") continue;
      const [r, g, b] = text === null ? palette[place(valueOf(code))] : SPECIAL[text];
      pixels[(rows - 1 - row) * columns + k] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    }
  }
  const [left, width] = span();
  const image = { dtype: "uint32", shape: [rows, columns] };
  const made = Bokeh.require("core/util/ndarray").ndarray(pixels.buffer, image);
  model("image").data = { image: [made], x: [left], y: [0], dw: [width * columns], dh: [rows] };
  const chart = model("map");
  chart.x_range.setv({ start: left, end: left + width * columns });
  chart.y_range.setv({ start: 0, end: rows });
  chart.below[0].axis_label = shown.regular ? "iteration" : "measurement (not evenly spaced)";
  nameRows(chart.left[0], sites);
  legend(log, least, most, leastAbove, special);
  const worst = least <= most ? `between ${told(least)} and ${told(most)}` : "no number";
  at("map-words").textContent = `${at("tensor").value}, ${at("statistic").value}: ${rows} sites, ${columns} measured iterations, ${worst}`
    + `, kept to ±${(100 / 2 ** (found().bits + 1)).toPrecision(1)} %`
    + (found().merged > 1 ? `; ${found().merged} measured iterations share a column` : "");
}

/** Start and width of columns: in iterations if they are evenly spaced, else in columns. */
function span() {
  const all = shown.iterations, step = all.length > 1 ? all[1] - all[0] : 1;
  shown.regular = all.every((value, i) => !i || value - all[i - 1] === step);
  return shown.regular ? [all[0] - step / 2, step] : [-0.5, 1];
}

/** Labels at the first site of each layer, at most 14; sites outside layers by the last part of their name. */
function nameRows(axis, sites) {
  const layer = sites.map((name) => name.match(/layers\.(\d+)\./)?.[1]);
  const starts = sites.map((_, i) => i).filter((i) => layer[i] === undefined || layer[i] !== layer[i - 1]);
  const step = Math.ceil(starts.length / 14), few = sites.length <= 4;
  const kept = few ? sites.map((_, i) => i) : starts.filter((_, i) => i % step === 0);
  const y = (i) => sites.length - i - 0.5;
  const short = (i) => (few || layer[i] === undefined ? sites[i].split(".").pop().slice(0, 16) : `layer ${layer[i]}`);
  axis.ticker = new (Bokeh.Models.get("FixedTicker"))({ ticks: kept.map(y) });
  axis.major_label_overrides = new Map(kept.map((i) => [y(i), short(i)]));
}

function legend(log, least, most, leastAbove, special) {
  const parts = [];
  if (least <= most) {
    const bar = element("canvas", undefined, { width: palette.length, height: 1, "aria-hidden": "true" });
    const context = bar.getContext("2d");
    palette.forEach(([r, g, b], i) => { context.fillStyle = `rgb(${r} ${g} ${b})`; context.fillRect(i, 0, 1, 1); });
    const low = log && least < leastAbove ? `0 and up to ${told(leastAbove)}` : told(least);
    parts.push(element("span", low), bar, element("span", `${told(most)}${log ? " (logarithmic)" : ""}`));
  }
  for (const [text, count] of special) {
    const swatch = element("span", undefined, { class: "key", "aria-hidden": "true" });
    swatch.style.background = SPECIAL[text] ? `rgb(${SPECIAL[text].join(" ")})` : "transparent";
    swatch.style.outline = "1px solid";
    const entry = element("span");
    entry.append(swatch, `${text} (${count})`);
    parts.push(entry);
  }
  at("colours").replaceChildren(...parts);
}

async function chooseSite() {
  const tensor = at("tensor").value, statistic = at("statistic").value, site = at("site").value;
  const words = [];
  for (const i of runs.keys()) {
    const codes = await mapOf(i, tensor, statistic);
    const row = runs[i].statistics?.sites.indexOf(site) ?? -1;
    const x = codes && row >= 0 ? await iterationsOf(runs[i].statistics.iterations) : [];
    const mine = x.length ? codes.subarray(row * x.length, (row + 1) * x.length) : [];
    const y = Array.from(mine, (code) => (inWords(code) === null ? valueOf(code) : NaN));
    model(`site/${i}`).data = { x: Array.from(x), y };
    const gaps = Array.from(mine, (code, k) => [x[k], x[k], inWords(code)]).filter(([, , text]) => text !== null && text !== "not measured");
    marks(model(`gaps/site/${i}`), gaps, GAPS_AT);
    shown.series[i] = { x: Array.from(x), y, gaps };
    const finite = y.filter(Number.isFinite);
    if (finite.length) words.push(`${runs.length > 1 ? `${runs[i].name}: ` : ""}from ${told(finite[0])} to ${told(finite.at(-1))}, between ${told(Math.min(...finite))} and ${told(Math.max(...finite))}`);
    if (i === shown.run) shown.site = { x: Array.from(x), codes: Array.from(mine) };
  }
  at("site-title").textContent = site;
  at("site-words").textContent = `${tensor}, ${statistic}: ${words.join("; ") || "no number"}`;
  readOut();
}

function box(name, left, right, bottom, top) {
  model(name).data = { left: [left], right: [right], bottom: [bottom], top: [top] };
}

function readOut() {
  const { sites, plans, planned } = found(), columns = shown.iterations.length;
  const row = at("site").selectedIndex, k = Number(at("iteration").value);
  const [left, width] = span(), y = sites.length - row;
  box("row", left, left + width * columns, y - 1, y);
  box("cell", left + width * k, left + width * (k + 1), y - 1, y);
  at("iteration").setAttribute("aria-valuetext", columnName(k));
  const text = `${sites[row]}, ${columnName(k)}: ${at("tensor").value} ${at("statistic").value} = ${spoken(shown.codes[row * columns + k])}`;
  at("readout").textContent = plans[planned[row]] ? `${text} (${plans[planned[row]]})` : text;
  tablesOfSites();
}

function tablesOfSites() {
  const { sites } = found(), columns = shown.iterations.length, k = Number(at("iteration").value);
  const title = `${at("tensor").value} ${at("statistic").value}`;
  if (at("sites-table").open) {
    table(at("sites-table").lastElementChild, columnName(k), ["site", title],
      sites.slice(0, 4 * ROWS).map((site, row) => [site, spoken(shown.codes[row * columns + k])]));
  }
  if (at("site-table").open) {
    table(at("site-table").lastElementChild, at("site").value, ["iteration", title],
      shown.site.x.map((iteration, i) => [iteration, spoken(shown.site.codes[i])]));
  }
}

/** The cell of the map under a pointer's event, or null. */
function cellOf(event) {
  if (event.origin?.name !== "map" || !shown.codes) return null;
  const [left, width] = span(), k = Math.floor((event.x - left) / width);
  const row = found().sites.length - 1 - Math.floor(event.y);
  return k >= 0 && k < shown.iterations.length && row >= 0 && row < found().sites.length ? { row, k } : null;
}

/** Text for the map cell at the pointer; also shown next to the fields, where it can be selected. */
function pointedCell(event) {
  const cell = cellOf(event);
  if (!cell) return [];
  const code = shown.codes[cell.row * shown.iterations.length + cell.k];
  at("pointed").textContent = `${found().sites[cell.row]}, ${columnName(cell.k)}: ${spoken(code)}`;
  return [found().sites[cell.row], `${columnName(cell.k)}: ${spoken(code)}`];
}

async function followSites() {
  if (!measured.length) return;
  options(at("run"), measured.map((i) => runs[i].name));
  at("run").closest("label").hidden = measured.length < 2;
  at("run").addEventListener("change", chooseRun);
  at("tensor").addEventListener("change", chooseTensor);
  at("statistic").addEventListener("change", chooseStatistic);
  at("scale").addEventListener("change", () => { drawMap(); readOut(); });
  at("site").addEventListener("change", chooseSite);
  at("iteration").addEventListener("input", readOut);
  at("choices").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["sites-table", "site-table"]) at(id).addEventListener("toggle", tablesOfSites);
  drawn.on_event("tap", async (_, event) => {
    const cell = cellOf(event);
    if (!cell) return;
    at("site").selectedIndex = cell.row;
    at("iteration").value = cell.k;
    await chooseSite();
  });
  drawn.on_event("doubletap", (_, event) => { if (event.origin?.name === "map") { drawMap(); readOut(); } });
  await chooseRun();
}

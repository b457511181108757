"use strict";
// Fills the charts (Bokeh's models, found by their names) with the numbers of the page, and follows its switches.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const models = JSON.parse(document.getElementById("models").textContent);
  const at = (id) => document.getElementById(id);
  const runs = data.runs;
  const GAPS_AT = 0.95, EVENTS_AT = 0.06, ROWS = 500;

  // ------------------------------------------------------------------------------------------------ numbers

  /** The bytes of base64 of zlib's format. */
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  /** BokehJS is kept deflated, at a third of its size; it runs as any other script of the page. */
  async function loadBokeh() {
    const script = element("script", new TextDecoder().decode(await unpacked(at("bokeh").textContent)));
    document.head.append(script);
    Bokeh.set_log_level("error");
  }

  async function iterationsOf(text) {
    return new Float64Array(await unpacked(text));
  }

  /** A map's codes: each is the one before it in its row and a step, of which there are the high bytes, then the low. */
  async function codesOf(text, columns) {
    const bytes = new Uint8Array(await unpacked(text)), half = bytes.length / 2;
    const codes = new Uint16Array(half);
    for (let i = 0; i < half; i++) {
      codes[i] = ((bytes[i] << 8) | bytes[half + i]) + (i % columns ? codes[i - 1] : 0);
    }
    return codes;
  }

  const word = new Uint32Array(1), number = new Float32Array(word.buffer);
  function valueOf(code) {
    word[0] = code << 16;
    return number[0];
  }

  /** What a code that is no number says; null for a number. */
  function inWords(code) {
    if (code === data.codes.absent) return "not measured";
    if (code === data.codes.null) return "null";
    if (code === data.codes.nan) return "NaN";
    if (code === 0x7f80) return "Infinity";
    return code === 0xff80 ? "-Infinity" : null;
  }

  const told = (value) => Number.isFinite(value) ? String(Number(value.toPrecision(3))) : String(value);
  const spoken = (code) => inWords(code) ?? told(valueOf(code));

  // ----------------------------------------------------------------------------------------------- elements

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  /** Put a table with these titles and rows, the first cell of a row its head, in place of what `place` holds. */
  function table(place, caption, titles, rows) {
    const made = element("table"), head = made.createTHead().insertRow(), body = made.createTBody();
    made.createCaption().textContent = caption;
    titles.forEach((title, i) => head.append(element("th", title, { scope: "col", class: i ? "n" : "" })));
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((cell, i) => line.append(i ? element("td", cell, { class: "n" }) : element("th", cell, { scope: "row" })));
    }
    place.replaceChildren(made);
  }

  function options(select, names, chosen) {
    select.replaceChildren(...names.map((name) => element("option", name, { value: name })));
    if (names.includes(chosen)) select.value = chosen;
  }

  // ------------------------------------------------------------------------------------------------- charts

  await loadBokeh();
  const drawn = Bokeh.require("document").Document.from_json(models);
  const model = (name) => drawn.get_model_by_name(name);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Shaded phases of a run, in all charts. */
  const bands = (run) => drawn.roots().flatMap((chart) => chart.center.filter((part) => part.name === `phase/${run}`));

  /** Colours of the reader's scheme, which may change while the page is open. */
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

  /** Bokeh's canvases take the focus and do nothing with it: the form's fields do all that a pointer does. */
  function unreachable(place) {
    for (const part of place.querySelectorAll("*")) {
      if (part.tabIndex >= 0) part.tabIndex = -1;
      if (part.shadowRoot) unreachable(part.shadowRoot);
    }
  }

  const series = (x, y, run) => ({ x, y, run: x.map(() => run), text: [] });

  function texts(x, y, name) {
    return Array.from(x, (_, i) => (runs.length > 1 ? `${name}: ${told(y[i])}` : told(y[i])));
  }

  function marks(source, gaps, height, name) {
    const x = gaps.map(([first, last]) => (first + last) / 2);
    const text = gaps.map(([first, last, what]) => (first === last ? what : `${what}, iterations ${first}–${last}`));
    source.data = { x, y: x.map(() => height), run: x.map(() => name), text };
  }

  const curves = [];
  async function fillCurves() {
    for (const [i, run] of runs.entries()) {
      curves[i] = {};
      await Promise.all(Object.entries(run.curves).map(async ([name, curve]) => {
        const x = await iterationsOf(curve.x), y = new Float32Array(await unpacked(curve.y));
        curves[i][name] = { x, y, gaps: curve.gaps };
        const source = model(`${name}/${i}`);
        if (source) source.data = { ...series(x, y, run.name), run: Array.from(x, () => run.name), text: texts(x, y, run.name) };
        const crosses = model(`gaps/${name}/${i}`);
        if (crosses) marks(crosses, curve.gaps, GAPS_AT, run.name);
      }));
      const events = model(`events/${i}`);
      if (events) marks(events, run.events.map(([first, last, kind, text]) => [first, last, `${kind}: ${text}`]), EVENTS_AT, run.name);
    }
  }

  /** Iterations that all charts of curves show. */
  function look(from, to) {
    const range = model("iterations");
    range.setv({ start: from, end: Math.max(to, from + 1) });
  }

  function followCurves() {
    const range = model("iterations");
    if (!range) return;
    const last = Math.max(1, ...runs.map((run) => run.last));
    const whole = () => look(Math.min(1, last - 1), last);
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
    const hidden = new Set([...document.querySelectorAll(".shows:not(:checked)")].map((box) => Number(box.value)));
    const columns = [];
    curves.forEach((run, i) => {
      if (!hidden.has(i)) for (const name of Object.keys(run)) columns.push([i, name]);
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

  // -------------------------------------------------------------------------------------------------- sites

  const shown = { run: 0, iterations: [], codes: null, regular: true };
  const measured = runs.map((_, i) => i).filter((i) => runs[i].statistics);
  const found = () => runs[shown.run].statistics;
  const decoded = new Map();

  /** A map of a run, or null if the run has none; decoded when it is first looked at. */
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

  /** The colours of a map: what numbers get, and what stands for those that are none. */
  const SPECIAL = { NaN: [230, 0, 126], Infinity: [255, 45, 30], "-Infinity": [255, 150, 0], null: [140, 140, 140] };
  const palette = Array.from({ length: data.palette.length / 6 }, (_, i) =>
    [0, 2, 4].map((k) => parseInt(data.palette.slice(6 * i + k, 6 * i + k + 2), 16)));

  function drawMap() {
    const { sites } = found(), codes = shown.codes, columns = shown.iterations.length, rows = sites.length;
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
      + (found().merged > 1 ? `; ${found().merged} measured iterations share a column` : "");
  }

  /** Where the first column begins and how wide each is: in iterations if they are evenly spaced, else in columns. */
  function span() {
    const all = shown.iterations, step = all.length > 1 ? all[1] - all[0] : 1;
    shown.regular = all.every((value, i) => !i || value - all[i - 1] === step);
    return shown.regular ? [all[0] - step / 2, step] : [-0.5, 1];
  }

  /** A label at the first site of every layer, at most 14 of them; sites elsewhere by their last name. */
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
      model(`site/${i}`).data = { x: Array.from(x), y, run: y.map(() => runs[i].name), text: texts(x, y, runs[i].name) };
      const gaps = Array.from(mine, (code, k) => [x[k], x[k], inWords(code)]).filter(([, , text]) => text !== null && text !== "not measured");
      marks(model(`gaps/site/${i}`), gaps, GAPS_AT, runs[i].name);
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
    const pointed = at("pointed"), asked = pointed.textContent;
    drawn.on_event("mousemove", (_, event) => {
      const cell = cellOf(event);
      if (!cell) { pointed.textContent = asked; return; }
      const code = shown.codes[cell.row * shown.iterations.length + cell.k];
      pointed.textContent = `${found().sites[cell.row]}, ${columnName(cell.k)}: ${spoken(code)}`;
    });
    drawn.on_event("mouseleave", () => { pointed.textContent = asked; });
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

  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  await fillCurves();
  followCurves();
  await followSites();
  // Filled first and drawn then: once.
  await Bokeh.embed.add_document_standalone(drawn, document.body, drawn.roots().map((chart) => at(`chart-${chart.name}`)));
  for (const chart of document.querySelectorAll(".chart")) unreachable(chart);
  document.documentElement.dataset.ready = "yes";
})().catch((error) => {
  const place = document.getElementById("trouble");
  place.hidden = false;
  place.textContent = `The charts cannot be drawn in this browser (${error.message}); the tables are complete.`;
  throw error;
});

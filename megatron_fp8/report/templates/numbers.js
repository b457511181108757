"use strict";
// Decoding and formatting of the page's numbers.

const data = JSON.parse(document.getElementById("data").textContent);
const models = JSON.parse(document.getElementById("models").textContent);
const at = (id) => document.getElementById(id);
const runs = data.runs;
const GAPS_AT = 0.95, EVENTS_AT = 0.06, ROWS = 500;

// ------------------------------------------------------------------------------------------------ numbers

/** Bytes from base64 text in zlib format. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function iterationsOf(text) {
  return new Float64Array(await unpacked(text));
}

/** A map's codes: the previous code of the row plus a step, stored as high, middle and low bytes. */
async function codesOf(text, columns) {
  const bytes = new Uint8Array(await unpacked(text)), count = bytes.length / 3;
  const codes = new Uint32Array(count);
  for (let i = 0; i < count; i++) {
    const step = (bytes[i] << 16) | (bytes[count + i] << 8) | bytes[2 * count + i];
    codes[i] = (step + (i % columns ? codes[i - 1] : 0)) & 0xffffff;
  }
  return codes;
}

const word = new Uint32Array(1), number = new Float32Array(word.buffer);
function valueOf(code) {
  word[0] = code << 8;
  return number[0];
}

/** Text of a special code; null for a number. */
function inWords(code) {
  if (code === data.codes.absent) return "not measured";
  if (code === data.codes.null) return "null";
  if (code === data.codes.nan) return "NaN";
  if (code === 0x7f8000) return "Infinity";
  return code === 0xff8000 ? "-Infinity" : null;
}

const told = (value) => Number.isFinite(value) ? String(Number(value.toPrecision(4))) : String(value);
const spoken = (code) => inWords(code) ?? told(valueOf(code));

// ----------------------------------------------------------------------------------------------- elements

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Replace the content of `place` by a table with these titles and rows; the first cell of a row is its header. */
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

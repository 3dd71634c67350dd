// Tables of numbers in views.

import { setText } from "../set_text.js";
import { make } from "./elements.js";

/** A table in a box that scrolls; the label is for screen readers. Fill the returned `table`, append the `box`. */
export function scrolledTable(label) {
  const table = make("table", { className: "numbers-table" });
  return { table, box: make("div", { className: "table-box", tabIndex: 0, role: "region", "aria-label": label }, table) };
}

/** Write texts into a table; the first of a row is its head. Of a table of the same shape only new texts are written. */
export function fillTable(table, heads, rows) {
  const isSame = table.rows.length === rows.length + 1 && table.rows[0].cells.length === heads.length;
  if (!isSame) table.replaceChildren(headOf(heads), make("tbody", {}, ...rows.map(rowOf)));
  else rows.forEach((row, i) => row.forEach((text, j) => setText(table.rows[i + 1].cells[j], text)));
}

function headOf(texts) {
  const cells = texts.map((textContent) => make("th", { scope: "col", textContent }));
  return make("thead", {}, make("tr", {}, ...cells));
}

function rowOf([head, ...texts]) {
  const cells = texts.map((textContent) => make("td", { textContent }));
  return make("tr", {}, make("th", { scope: "row", textContent: head }), ...cells);
}

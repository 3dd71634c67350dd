// Tables with explicit roles: CSS may lay out their rows in another way.

import { make } from "../elements.js";

export function table(className, columns, body) {
  const heads = columns.map((textContent) => make("th", { scope: "col", role: "columnheader", textContent }));
  const head = make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads));
  return make("table", { className, role: "table" }, head, body);
}

export const tableBody = () => make("tbody", { role: "rowgroup" });

/** A row with its name; `cells` are elements. */
export function tableRow(name, cells) {
  return make("tr", { role: "row" }, make("th", { scope: "row", role: "rowheader", textContent: name }), ...cells);
}

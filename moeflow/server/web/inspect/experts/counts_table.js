// The counts of the map as a table, for screen readers and for copying.

import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { fillTable, scrolledTable } from "../tables.js";

export class CountsTable {
  /** `onCopy(text, button)` copies. */
  constructor(onCopy) {
    this.layers = [];
    this.counts = [];
    const { table, box } = scrolledTable(tr("Tokens of each expert"));
    this.table = table;
    const summary = make("summary", { textContent: tr("Tokens of each expert as a table") });
    const copy = make("button", { type: "button", className: "link", textContent: tr("Copy") });
    copy.addEventListener("click", () => onCopy(this.text, copy));
    this.element = make("details", {}, summary, copy, box);
    this.element.addEventListener("toggle", () => this.draw());
  }

  show(layers, counts) {
    Object.assign(this, { layers, counts });
    this.draw();
  }

  get heads() {
    return [tr("Layer"), ...(this.counts[0] ?? []).map((_, expert) => String(expert))];
  }

  get rows() {
    return this.counts.map((row, i) => [this.layers[i], ...row].map(String));
  }

  /** Tab-separated lines. */
  get text() {
    return [this.heads, ...this.rows].map((line) => line.join("\t")).join("\n");
  }

  draw() {
    if (this.element.open) fillTable(this.table, this.heads, this.rows);
  }
}

// The counts of the map as a table, for screen readers and for copying.

import { tr } from "../../translate.js";
import { make } from "../elements.js";

export class CountsTable {
  /** `onCopy(text, button)` copies. */
  constructor(onCopy) {
    this.layers = [];
    this.counts = [];
    this.table = make("table", { className: "numbers-table" });
    const copy = make("button", { type: "button", className: "link", textContent: tr("Copy") });
    copy.addEventListener("click", () => onCopy(this.text, copy));
    this.element = make("details", { className: "counts-table" }, make("summary", { textContent: tr("Tokens of each expert as a table") }), copy, make("div", { className: "table-box", tabIndex: 0, role: "region", "aria-label": tr("Tokens of each expert") }, this.table));
    this.element.addEventListener("toggle", () => this.draw());
  }

  show(layers, counts) {
    Object.assign(this, { layers, counts });
    this.draw();
  }

  /** Tab-separated, with a line of heads. */
  get text() {
    return this.lines.map((line) => line.join("\t")).join("\n");
  }

  get lines() {
    const experts = this.counts[0]?.map((_, expert) => String(expert)) ?? [];
    return [[tr("Layer"), ...experts], ...this.counts.map((row, i) => [this.layers[i], ...row].map(String))];
  }

  draw() {
    if (!this.element.open) return;
    const [head, ...rows] = this.lines;
    const first = this.table.rows.length === rows.length + 1 && this.table.rows[0].cells.length === head.length;
    if (!first) this.table.replaceChildren(headOf(head), bodyOf(rows));
    else rows.forEach((row, i) => row.forEach((text, j) => write(this.table.rows[i + 1].cells[j], text)));
  }
}

const write = (cell, text) => cell.textContent !== text && (cell.textContent = text);

const headOf = (texts) => make("thead", {}, make("tr", {}, ...texts.map((text) => make("th", { scope: "col", textContent: text }))));

function bodyOf(rows) {
  const line = ([layer, ...counts]) => make("tr", {}, make("th", { scope: "row", textContent: layer }), ...counts.map((text) => make("td", { textContent: text })));
  return make("tbody", {}, ...rows.map(line));
}

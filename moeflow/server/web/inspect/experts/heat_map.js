// Layers by experts as a map of cells. Wide maps scroll, and the numbers of layers stay in view. Arrow keys move from
// cell to cell, Enter and a click choose one.

import { colours, Plot, setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";

const HEAD_PX = 18; // numbers of experts
const SIDE_PX = 34; // numbers of layers
const LEAST_PX = matchMedia("(pointer: coarse)").matches ? 4 : 2.5; // width of a cell
const MOST_PX = 72;
const HEIGHTS_PX = [[16, 22], [32, 18], [48, 13], [80, 10], [Infinity, 7]]; // of a cell, up to so many layers
const TEXT_PX = { width: 26, height: 13 }; // least cell with text
const FONT = "11px system-ui, sans-serif";

export class HeatMap {
  /** `onChoose(row, column)`: a cell was chosen; `announce(text)` tells screen readers of the one that keys reach. */
  constructor({ label, onChoose, announce }) {
    Object.assign(this, { onChoose, announce });
    this.side = make("canvas", { className: "heat-side", "aria-hidden": "true" });
    this.canvas = make("canvas", { className: "heat-cells", tabIndex: 0, role: "application", "aria-label": label });
    this.scroll = make("div", { className: "heat-scroll" }, this.canvas);
    this.element = make("div", { className: "heat-map" }, this.side, this.scroll);
    this.plot = new Plot(this.canvas, (pen) => this.drawCells(pen));
    this.sidePlot = new Plot(this.side, (pen) => this.drawSide(pen));
    this.tooltip = new Tooltip();
    this.layers = []; // their numbers
    this.numColumns = 0;
    this.describe = null; // and painter: see `show`
    this.painter = null;
    this.chosen = null; // [row, column]
    this.at = null; // the cell under pointer or keyboard
    this.route = []; // cells to mark, such as the choices of one token: [row, column]
    this.row = null; // to mark: the layer that is shown elsewhere
    new ResizeObserver(() => this.fit()).observe(this.element);
    this.listen();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.point(this.cellOf(event), event));
    canvas.addEventListener("pointerleave", () => this.tooltip.leave() && this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("click", (event) => this.choose(this.cellOf(event)));
    canvas.addEventListener("keydown", (event) => this.step(event));
  }

  /** Show cells. `layers` has the number of each row. `describe(row, column)` returns the lines for a person. `painter()`
   *  is called before each drawing, as colours may have changed. It returns fill(pen, row, column, box), and
   *  text(row, column) for large cells: { text, colour }. */
  show(layers, numColumns, { describe, painter }) {
    const isNew = String(this.layers) !== String(layers) || this.numColumns !== numColumns;
    Object.assign(this, { layers, numColumns, describe, painter });
    if (isNew) {
      if (this.at && !this.has(this.at)) this.leave();
      this.fit();
    }
    this.plot.redraw();
    if (isNew) this.sidePlot.redraw();
    if (this.at && !this.tooltip.element.hidden) this.tell(...this.toldAt);
  }

  /** Whether there is such a cell. Tokens of another model may name others. */
  has([row, column]) {
    return row < this.layers.length && column < this.numColumns;
  }

  mark({ chosen = this.chosen, route = this.route, row = this.row }) {
    if (row !== this.row) this.sidePlot.redraw();
    Object.assign(this, { chosen, route, row });
    this.plot.redraw();
  }

  /** Choose the size of cells by the width of the view. */
  fit() {
    const room = this.element.clientWidth - SIDE_PX;
    if (!this.numColumns || room <= 0) return;
    this.cellWidth = Math.min(MOST_PX, Math.max(LEAST_PX, room / this.numColumns));
    this.cellHeight = HEIGHTS_PX.find(([rows]) => this.layers.length <= rows)[1];
    const height = HEAD_PX + this.layers.length * this.cellHeight + 1;
    this.plot.setSize(Math.floor(this.numColumns * this.cellWidth) + 1, height);
    this.sidePlot.setSize(SIDE_PX, height);
    const isScrolled = this.numColumns * this.cellWidth > room + 1;
    setStyles(this.scroll, { "overflow-x": isScrolled ? "auto" : "hidden" });
    this.plot.redraw();
  }

  box(row, column) {
    const left = Math.round(column * this.cellWidth);
    const gap = this.cellWidth >= 6 ? 1 : 0;
    return {
      left,
      top: HEAD_PX + row * this.cellHeight,
      width: Math.round((column + 1) * this.cellWidth) - left - gap,
      height: this.cellHeight - (this.cellHeight >= 6 ? 1 : 0),
    };
  }

  drawCells(pen) {
    if (!this.painter) return;
    const look = this.painter();
    const { text, muted, ground } = colours(this.canvas, "text", "muted", "ground");
    pen.font = FONT;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = muted;
    const every = everyNth(this.cellWidth, pen.measureText(String(this.numColumns)).width + 6);
    for (let column = 0; column < this.numColumns; column += every) {
      const middle = (column + 0.5) * this.cellWidth;
      pen.fillText(column, Math.max(middle, pen.measureText(column).width / 2), HEAD_PX / 2);
    }
    const hasText = this.cellWidth >= TEXT_PX.width && this.cellHeight >= TEXT_PX.height;
    for (let row = 0; row < this.layers.length; row += 1) {
      for (let column = 0; column < this.numColumns; column += 1) this.drawCell(pen, look, row, column, hasText);
    }
    for (const cell of this.route.filter((it) => this.has(it))) this.ring(pen, cell, [[3, ground], [1.5, text]]);
    if (this.chosen) this.ring(pen, this.chosen, [[5, ground], [2.5, text]]);
    if (this.at) this.ring(pen, this.at, [[3, ground], [1.5, text]]);
  }

  drawCell(pen, look, row, column, hasText) {
    const box = this.box(row, column);
    look.fill(pen, row, column, box);
    if (!hasText) return;
    const { text, colour } = look.text(row, column);
    pen.fillStyle = colour;
    pen.fillText(text, box.left + box.width / 2, box.top + box.height / 2 + 0.5);
  }

  ring(pen, [row, column], strokes) {
    const { left, top, width, height } = this.box(row, column);
    for (const [thickness, colour] of strokes) {
      pen.lineWidth = thickness;
      pen.strokeStyle = colour;
      pen.strokeRect(left, top, Math.max(width, 2), height);
    }
  }

  drawSide(pen) {
    if (!this.layers.length) return;
    const { muted, text } = colours(this.side, "muted", "text");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = everyNth(this.cellHeight, 12);
    for (const [row, layer] of this.layers.entries()) {
      const isMarked = row === this.row;
      const isNear = this.row !== null && Math.abs(row - this.row) < every;
      if (!isMarked && (row % every || isNear)) continue;
      pen.font = isMarked ? `bold ${FONT}` : FONT;
      pen.fillStyle = isMarked ? text : muted;
      pen.fillText(isMarked ? `${layer} ▸` : layer, SIDE_PX - (isMarked ? 1 : 10), HEAD_PX + (row + 0.5) * this.cellHeight);
    }
  }

  cellOf({ offsetX, offsetY }) {
    const column = Math.floor(offsetX / this.cellWidth);
    const row = Math.floor((offsetY - HEAD_PX) / this.cellHeight);
    return row >= 0 && row < this.layers.length && column >= 0 && column < this.numColumns ? [row, column] : null;
  }

  point(cell, event) {
    const isSame = String(this.at) === String(cell);
    this.at = cell;
    if (!isSame) this.plot.redraw();
    if (cell) this.tell({ x: event.clientX, y: event.clientY });
    else this.tooltip.hide();
  }

  leave() {
    this.at = null;
    this.tooltip.hide();
    this.plot.redraw();
  }

  /** Show the lines about the cell at a point of the window. */
  tell(place, options) {
    this.toldAt = [place, options];
    this.tooltip.show(this.describe(...this.at), place, this.canvas, options);
  }

  choose(cell) {
    if (!cell) return;
    this.mark({ chosen: cell });
    this.onChoose(...cell);
  }

  step(event) {
    const [row, column] = this.at ?? this.chosen ?? [0, 0];
    const last = { row: this.layers.length - 1, column: this.numColumns - 1 };
    const targets = {
      ArrowLeft: [row, Math.max(0, column - 1)],
      ArrowRight: [row, Math.min(last.column, column + 1)],
      ArrowUp: [Math.max(0, row - 1), column],
      ArrowDown: [Math.min(last.row, row + 1), column],
      Home: [row, 0],
      End: [row, last.column],
      PageUp: [0, column],
      PageDown: [last.row, column],
    };
    if (event.key === "Enter" || event.key === " ") this.choose([row, column]);
    else if (event.key in targets) this.reach(this.at ? targets[event.key] : [row, column]);
    else return;
    event.preventDefault();
  }

  /** Go to a cell by the keyboard. */
  reach(cell) {
    this.at = cell;
    const { left, top, width, height } = this.box(...cell);
    const { scroll } = this;
    const isSeen = left >= scroll.scrollLeft && left + width <= scroll.scrollLeft + scroll.clientWidth;
    if (!isSeen) scroll.scrollLeft = left - scroll.clientWidth / 2;
    const canvas = this.canvas.getBoundingClientRect();
    this.plot.redraw();
    this.tell({ x: canvas.left + left + width, y: canvas.top + top + height }, { isByKeys: true });
    this.announce(this.describe(...cell).join(", "));
  }
}

/** Label every so many cells, that labels of this size do not touch. */
function everyNth(cellPx, labelPx) {
  const least = Math.ceil(labelPx / cellPx);
  return [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64].find((it) => it >= least) ?? least;
}

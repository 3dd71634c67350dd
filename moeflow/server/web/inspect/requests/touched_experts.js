// The experts that a request touched: a small map of layers by experts, and those with the most tokens.

import { formatNumber, formatPercent, textKey, tr } from "../../translate.js";
import { colours, Plot, setStyles } from "../canvas.js";
import { make } from "../elements.js";

const NUM_TOP = 5;
const ROW_PX = 6;
const MIN_HEIGHT_PX = 48;
const HEADS = [textKey("Layer"), textKey("Expert"), textKey("Tokens"), textKey("Share of all tokens")];

export class TouchedExperts {
  /** `onShow()` shows them in the view of experts. */
  constructor(onShow) {
    this.canvas = make("canvas", { className: "touched-map", role: "img" });
    this.plot = new Plot(this.canvas, (pen, size) => this.draw(pen, size));
    this.line = make("p");
    this.rows = make("tbody");
    const head = make("thead", {}, make("tr", {}, ...HEADS.map((title) => make("th", { scope: "col", textContent: tr(title) }))));
    const button = make("button", { type: "button", className: "link", textContent: tr("Show in Experts") });
    button.addEventListener("click", onShow);
    this.element = make("div", {}, this.line, this.canvas, make("table", { className: "story-table" }, head, this.rows), button);
  }

  /** `layers` are the numbers of the layers, `counts` the tokens of each expert in each of them; a token has `topK`. */
  show({ layers, num_experts: numExperts, top_k: topK, counts }) {
    this.counts = counts;
    const cells = counts.flatMap((row, i) => row.map((tokens, expert) => ({ layer: layers[i], expert, tokens, share: (topK * tokens) / (sum(row) || 1) })));
    const touched = cells.filter(({ tokens }) => tokens).length;
    const text = tr("It touched {touched} of {all} experts of {layers} layers.", { touched: formatNumber(touched), all: formatNumber(layers.length * numExperts), layers: formatNumber(layers.length) });
    this.line.textContent = text;
    this.canvas.setAttribute("aria-label", text);
    setStyles(this.canvas, { height: `${Math.max(MIN_HEIGHT_PX, ROW_PX * layers.length)}px` });
    const top = cells.toSorted((a, b) => b.tokens - a.tokens).slice(0, NUM_TOP);
    this.rows.replaceChildren(...top.map(({ layer, expert, tokens, share }) => make("tr", {}, ...[formatNumber(layer), formatNumber(expert), formatNumber(tokens), formatPercent(share)].map((cell) => make("td", { textContent: cell })))));
    this.plot.redraw();
  }

  /** Rows are layers; the more tokens an expert has, the fuller its cell. */
  draw(pen, { width, height }) {
    if (!this.counts?.length) return;
    const { accent, line } = colours(this.canvas, "accent", "line");
    const most = Math.max(1, ...this.counts.flat());
    const [cellWidth, cellHeight] = [width / this.counts[0].length, height / this.counts.length];
    this.counts.forEach((row, y) => {
      row.forEach((tokens, x) => {
        pen.globalAlpha = 1;
        pen.fillStyle = line;
        pen.fillRect(x * cellWidth, y * cellHeight, cellWidth - 0.5, cellHeight - 0.5);
        pen.globalAlpha = tokens / most;
        pen.fillStyle = accent;
        pen.fillRect(x * cellWidth, y * cellHeight, cellWidth - 0.5, cellHeight - 0.5);
      });
    });
  }
}

const sum = (row) => row.reduce((total, value) => total + value, 0);

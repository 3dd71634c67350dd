// What the colours of a map mean: a scale with numbers, or named areas.

import { colours, isDark, Plot } from "../canvas.js";
import { make } from "../elements.js";
import { tr } from "../../translate.js";
import { heat } from "./palette.js";

const BAR_PX = 12;
const FONT = "11px system-ui, sans-serif";

export class ScaleLegend {
  constructor() {
    const canvas = make("canvas", { role: "img" });
    this.canvas = canvas;
    this.element = make(
      "div",
      { className: "scale-legend" },
      make("span", { textContent: tr("Tokens relative to even routing, which is 1") }),
      canvas,
      make("span", { textContent: tr("empty: no tokens") }),
    );
    this.top = 2;
    this.plot = new Plot(canvas, (pen, size) => this.draw(pen, size));
  }

  /** `top` is the value at the end of the scale. */
  show(top) {
    if (top === this.top && this.canvas.ariaLabel) return;
    this.top = top;
    this.canvas.ariaLabel = tr("Scale from 0 to {top}; 1 is even routing", { top });
    this.plot.redraw();
  }

  draw(pen, { width }) {
    const { muted } = colours(this.canvas, "muted");
    const dark = isDark(this.canvas);
    const room = { left: 14, width: width - 28 };
    for (let x = 0; x < room.width; x += 1) {
      pen.fillStyle = heat(x / room.width, dark);
      pen.fillRect(room.left + x, 0, 1, BAR_PX);
    }
    pen.font = FONT;
    pen.fillStyle = muted;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const numbers = this.top <= 4 ? [0, 1, ...range(2, this.top)] : [0, 1, this.top / 2, this.top];
    for (const value of numbers) {
      const x = room.left + (room.width * value) / this.top;
      pen.fillRect(Math.round(x), BAR_PX, 1, 3);
      pen.fillText(value === this.top ? `≥${value}` : value, x, BAR_PX + 4);
    }
  }
}

const range = (first, last) => Array.from({ length: last - first + 1 }, (_, i) => first + i);

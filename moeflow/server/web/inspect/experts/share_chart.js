// The share of one expert over the last minutes, as a line.

import { drawAxes, stroke } from "../axes.js";
import { colours, Plot } from "../canvas.js";
import { make } from "../elements.js";
import { tr } from "../../translate.js";
import { percent } from "./format.js";

const LEAST_S = 30; // of time that is shown

export class ShareChart {
  constructor() {
    this.canvas = make("canvas", { className: "share-chart", role: "img" });
    this.caption = make("figcaption", { className: "hint" });
    this.element = make("figure", {}, this.canvas, this.caption);
    this.points = [];
    this.even = 0;
    this.plot = new Plot(this.canvas, (pen, size) => this.draw(pen, size));
  }

  /** `points` are [seconds from now, share]; `even` is the share with even routing. */
  show(points, even) {
    Object.assign(this, { points, even });
    this.element.classList.toggle("is-empty", points.length < 2);
    this.caption.textContent = points.length < 2
      ? tr("The line begins as soon as tokens are computed while this view is open.")
      : tr("Share of tokens over 10 s, since this view was opened. The dashed line is even routing.");
    const last = points.at(-1)?.[1] ?? 0;
    this.canvas.ariaLabel = tr("Share over time, {share} at the end", { share: percent(last) });
    this.plot.redraw();
  }

  draw(pen, size) {
    const { points, even } = this;
    if (points.length < 2) return;
    const { accent, muted } = colours(this.canvas, "accent", "muted");
    const high = Math.min(1, Math.max(even * 1.5, ...points.map(([, share]) => share * 1.1)));
    const { x, y, box } = drawAxes(pen, size, {
      x: { low: Math.min(-LEAST_S, points[0][0]), high: 0, format: (value) => (value ? `${value} s` : tr("now")) },
      y: { low: 0, high, format: percent },
    });
    pen.strokeStyle = muted;
    pen.setLineDash([4, 4]);
    stroke(pen, [box.left, y(even)], [box.right, y(even)]);
    pen.setLineDash([]);
    pen.strokeStyle = accent;
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    stroke(pen, ...points.map(([time, share]) => [x(time), y(share)]));
  }
}

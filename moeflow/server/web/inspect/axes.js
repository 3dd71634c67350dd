// The axes of a plot: from values to CSS pixels, with ticks, their labels and faint lines.

import { colours, ticks } from "./canvas.js";

const FONT = "11px system-ui, sans-serif";
const TICK_GAP_PX = { x: 90, y: 32 }; // about so far from tick to tick

/** Draw both axes into a plot of this size and return how values become pixels.
 *
 *  An axis is { low, high, format(value) -> text }. Returns { x(value), y(value), box }: `box` has left, right, top and
 *  bottom of the area between the axes. */
export function drawAxes(pen, { width, height }, { x, y }) {
  const { muted, line } = colours(pen.canvas, "muted", "line");
  pen.font = FONT;
  const yTicks = ticks(y.low, y.high, Math.max(1, Math.round(height / TICK_GAP_PX.y)));
  const labelWidth = Math.max(...yTicks.map((value) => pen.measureText(y.format(value)).width));
  const box = { left: Math.ceil(labelWidth) + 8, right: width - 8, top: 8, bottom: height - 20 };
  const place = {
    x: (value) => box.left + ((value - x.low) / (x.high - x.low || 1)) * (box.right - box.left),
    y: (value) => box.bottom - ((value - y.low) / (y.high - y.low || 1)) * (box.bottom - box.top),
  };
  pen.strokeStyle = line;
  pen.fillStyle = muted;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of yTicks) {
    stroke(pen, [box.left, Math.round(place.y(value)) + 0.5], [box.right, Math.round(place.y(value)) + 0.5]);
    pen.fillText(y.format(value), box.left - 6, place.y(value));
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const value of ticks(x.low, x.high, Math.max(1, Math.round((box.right - box.left) / TICK_GAP_PX.x)))) {
    const text = x.format(value);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(place.x(value), half), width - half), box.bottom + 6);
  }
  return { ...place, box };
}

/** Draw a line through points in CSS pixels. */
export function stroke(pen, ...points) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
}

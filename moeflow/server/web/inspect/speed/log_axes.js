// Logarithmic axes of a plot: from values to CSS pixels, with ticks at 1, 2 and 5 of each power of ten.

import { colours } from "../canvas.js";
import { stroke } from "../axes.js";

export const FONT = "11px system-ui, sans-serif";
const MIN_GAP_PX = { x: 36, y: 18 }; // between labels

/** Draw both axes into a plot of this size and return how values become pixels.
 *
 *  An axis is { low, high, title, format(value) -> text }. Returns { x(value), y(value), box }. */
export function drawLogAxes(pen, { width, height }, { x, y }) {
  const { muted, line } = colours(pen.canvas, "muted", "line");
  pen.font = FONT;
  const labels = steps(y).map((value) => [value, y.format(value)]);
  const labelWidth = Math.max(...labels.map(([, text]) => pen.measureText(text).width));
  const box = { left: Math.ceil(labelWidth) + 8, right: width - 8, top: 22, bottom: height - 36 };
  const place = {
    x: (value) => box.left + share(value, x) * (box.right - box.left),
    y: (value) => box.bottom - share(value, y) * (box.bottom - box.top),
  };
  pen.strokeStyle = line;
  pen.fillStyle = muted;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  let last = Infinity;
  for (const [value, text] of labels) {
    const top = Math.round(place.y(value)) + 0.5;
    stroke(pen, [box.left, top], [box.right, top]);
    if (last - top < MIN_GAP_PX.y) continue;
    pen.fillText(text, box.left - 6, top);
    last = top;
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  last = -Infinity;
  for (const value of steps(x)) {
    const left = Math.round(place.x(value)) + 0.5;
    stroke(pen, [left, box.top], [left, box.bottom]);
    if (left - last < MIN_GAP_PX.x) continue;
    pen.fillText(x.format(value), left, box.bottom + 5);
    last = left;
  }
  pen.textAlign = "right";
  pen.fillText(x.title, box.right, box.bottom + 20);
  pen.textAlign = "left";
  pen.fillText(y.title, 0, 2);
  return { ...place, box };
}

/** The values within an axis that get a line. */
function steps({ low, high }) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const all = Array.from({ length: last - first + 1 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** (first + i))).flat();
  return all.filter((value) => value >= low && value <= high);
}

const share = (value, { low, high }) => Math.log(value / low) / Math.log(high / low);

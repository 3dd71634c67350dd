// The roofline: what the machine allows at each intensity, where passes lie now, and where the plan expects them.

import { Plot, colours } from "../canvas.js";
import { stroke } from "../axes.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";
import { setText } from "../../set_text.js";
import { formatPercent, tr } from "../../translate.js";
import { FONT, drawLogAxes } from "./log_axes.js";
import { ago, decimal, digits } from "./units.js";

const NEAR_PX = 18; // the pointer reaches a mark from so far
const MARK_PX = 5;
const TRAIL_PX = 2;
const LABEL_PX = 14; // the height of a label

export class Roofline {
  constructor() {
    this.canvas = make("canvas", { className: "roofline", role: "img" });
    this.legend = make("ul", { className: "speed-legend" });
    this.legendTexts = "";
    this.reason = make("p", { className: "hint" });
    this.element = make("div", {}, this.canvas, this.legend, this.reason);
    this.tooltip = new Tooltip();
    this.places = []; // of the marks, as drawn: { left, top, lines }
    this.plot = new Plot(this.canvas, (pen, size) => this.draw(pen, size));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.tooltip.hide());
  }

  /** `seen` is the answer of /stats/speed. */
  show(seen) {
    this.seen = seen;
    const { roofs } = seen;
    const isKnown = Boolean(roofs?.memory_bytes_per_s);
    this.canvas.hidden = this.legend.hidden = !isKnown;
    setText(this.reason, isKnown || !roofs ? "" : tr("There is no chart: {reason}", { reason: roofs.unknown }));
    if (!isKnown) return;
    const marks = marksOf(seen);
    const items = [...marks, ...(seen.trail.length ? [TRAIL] : [])].map(({ shape, kind, name }) => legendItem(shape, kind, name()));
    const texts = items.map(({ textContent }) => textContent).join();
    if (texts !== this.legendTexts) this.legend.replaceChildren(...items); // else marked text stays
    this.legendTexts = texts;
    this.canvas.setAttribute("aria-label", label(seen, marks));
    this.plot.redraw();
  }

  draw(pen, size) {
    const { seen } = this;
    if (!seen?.roofs?.memory_bytes_per_s) return;
    const marks = marksOf(seen);
    const axes = drawLogAxes(pen, size, ranges(seen, marks));
    const palette = colours(this.canvas, "text", "muted", "accent", "prompts", "surface", "ground");
    pen.save();
    pen.beginPath();
    pen.rect(axes.box.left, axes.box.top - 14, axes.box.right - axes.box.left, axes.box.bottom - axes.box.top + 14);
    pen.clip();
    drawRoofs(pen, axes, seen.roofs, palette);
    drawPeaks(pen, axes, seen.roofs, palette);
    drawTrail(pen, axes, seen.trail, palette);
    for (const mark of marks) drawDrop(pen, axes, mark, seen.roofs, palette);
    for (const mark of marks) drawMark(pen, axes.x(mark.intensity), axes.y(mark.flopsPerS), mark, palette);
    pen.restore();
    this.places = marks.map((mark) => ({ left: axes.x(mark.intensity), top: axes.y(mark.flopsPerS), lines: mark.lines() }));
  }

  point(event) {
    const distance = ({ left, top }) => Math.hypot(left - event.offsetX, top - event.offsetY);
    const nearest = this.places.toSorted((a, b) => distance(a) - distance(b))[0];
    if (nearest && distance(nearest) < NEAR_PX) this.tooltip.show(nearest.lines, { x: event.clientX, y: event.clientY }, this.canvas);
    else this.tooltip.hide();
  }
}

const TRAIL = { shape: "trail", kind: "decode", name: () => tr("the last minute") };

/** The marks of the chart: points of passes now, and of the plan. */
export function marksOf({ now, marks, roofs }) {
  const found = [];
  for (const kind of ["decode", "prompts"]) {
    const point = now[kind];
    if (!point) continue;
    found.push({
      kind,
      shape: kind === "decode" ? "circle" : "square",
      name: () => (kind === "decode" ? tr("decoding, measured") : tr("prompts, measured")),
      intensity: point.intensity,
      flopsPerS: point.flops_per_s,
      share: point.share_of_roof,
      isMeasured: true,
      lines: () => [
        kind === "decode" ? tr("Decoding, measured") : tr("Prompts, measured"),
        ...rateLines(point.intensity, point.flops_per_s, roofs),
        tr("{count} tokens a pass, {age}", { count: digits(point.tokens_per_pass), age: ago(point.age_s) }),
      ],
    });
  }
  for (const { num_sequences: number, intensity, flops_per_s: flopsPerS, tokens_per_s: speed } of marks) {
    const name = () => (number === 1 ? tr("plan, one request") : tr("plan, {count} requests", { count: digits(number) }));
    found.push({
      kind: "plan",
      shape: number === 1 ? "diamond" : "full-diamond",
      name,
      intensity,
      flopsPerS,
      share: flopsPerS / roofAt(intensity, roofs),
      lines: () => [name(), ...rateLines(intensity, flopsPerS, roofs), tr("{speed} tokens/s", { speed: digits(speed) })],
    });
  }
  return found;
}

function rateLines(intensity, flopsPerS, roofs) {
  const share = flopsPerS / roofAt(intensity, roofs);
  return [
    tr("{rate} at {intensity} FLOP per byte", { rate: decimal(flopsPerS, "FLOP/s"), intensity: digits(intensity) }),
    tr("{share} of the roof", { share: formatPercent(share) }),
  ];
}

/** The most FLOP/s at an intensity, for the model's weights. */
export function roofAt(intensity, { memory_bytes_per_s: memory, flops_per_s: flops, weights_roof: format }) {
  return Math.min(memory * intensity, flops[format]);
}

function ranges({ roofs, trail }, marks) {
  const points = [...marks.map((it) => [it.intensity, it.flopsPerS]), ...trail.map((it) => [it.intensity, it.flops_per_s])];
  const peak = Math.max(...Object.values(roofs.flops_per_s));
  const ridge = peak / roofs.memory_bytes_per_s;
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  return {
    x: { low: Math.min(0.5, ...xs) / 1.5, high: Math.max(ridge * 8, ...xs) * 1.5, title: tr("FLOP per byte"), format: plain },
    y: { low: Math.min(roofs.memory_bytes_per_s * 0.25, ...ys) / 1.5, high: peak * 2, title: tr("FLOP per second"), format: (value) => decimal(value, "") },
  };
}

const plain = (value) => digits(value);

const highestFirst = (roofs) => Object.entries(roofs.flops_per_s).toSorted(([, a], [, b]) => b - a);

/** Lines: the memory's roof up to the highest peak, and a peak for each format; the weights' one is thick. */
function drawRoofs(pen, { x, y, box }, roofs, { text, muted, ground }) {
  const peaks = highestFirst(roofs);
  const ridge = peaks[0][1] / roofs.memory_bytes_per_s;
  const left = 1e-6;
  pen.strokeStyle = text;
  pen.lineWidth = 2;
  stroke(pen, [x(left), y(left * roofs.memory_bytes_per_s)], [x(ridge), y(peaks[0][1])]);
  for (const [format, peak] of peaks) {
    const isWeights = format === roofs.weights_roof;
    pen.strokeStyle = isWeights ? text : muted;
    pen.lineWidth = isWeights ? 2 : 1;
    stroke(pen, [x(peak / roofs.memory_bytes_per_s), y(peak)], [box.right, y(peak)]);
  }
  drawAlong(pen, { x, y, box }, roofs, { text, ground });
}

/** The names of the peaks, side by side where they would cover each other. */
function drawPeaks(pen, { y, box }, roofs, { text, muted, ground }) {
  pen.textAlign = "right";
  pen.font = FONT; // labels are measured before they are written
  let [lastTop, right] = [-Infinity, box.right - 4];
  for (const [format, peak] of highestFirst(roofs)) {
    const label = `${format} ${decimal(peak, "FLOP/s")}`;
    const isBeside = y(peak) - lastTop < LABEL_PX;
    const width = pen.measureText(label).width;
    right = isBeside ? right : box.right - 4;
    if (right - width < box.left) continue; // the lines are closer than labels are high, and the window is narrow
    writeOver(pen, label, right, y(peak) - 2, format === roofs.weights_roof ? text : muted, ground);
    right -= width + 12;
    lastTop = y(peak);
  }
}

/** Text that stays readable on lines. */
function writeOver(pen, text, left, top, colour, ground) {
  pen.font = FONT;
  pen.textBaseline = "bottom";
  pen.lineWidth = 4;
  pen.lineJoin = "round";
  pen.strokeStyle = ground;
  pen.strokeText(text, left, top);
  pen.fillStyle = colour;
  pen.fillText(text, left, top);
}

/** The memory's rate, written along its roof. */
function drawAlong(pen, { x, y, box }, roofs, { text, ground }) {
  const [low, high] = [1, 2].map((intensity) => [x(intensity), y(intensity * roofs.memory_bytes_per_s)]);
  const angle = Math.atan2(high[1] - low[1], high[0] - low[0]);
  const label = tr("memory {rate}", { rate: decimal(roofs.memory_bytes_per_s, "B/s") });
  pen.save();
  pen.textAlign = "left";
  const left = box.left + 6;
  pen.translate(left, low[1] + ((left - low[0]) * (high[1] - low[1])) / (high[0] - low[0]));
  pen.rotate(angle);
  writeOver(pen, label, 0, -4, text, ground);
  pen.restore();
}

function drawTrail(pen, { x, y }, trail, palette) {
  for (const { kind, intensity, flops_per_s: flopsPerS, age_s: ageS } of trail) {
    pen.globalAlpha = 0.15 + 0.35 * (1 - Math.min(ageS / 60, 1));
    pen.fillStyle = palette[kind === "decode" ? "accent" : "prompts"];
    pen.beginPath();
    pen.arc(x(intensity), y(flopsPerS), TRAIL_PX, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

/** A dashed line from a measured point up to its roof: the missing part. */
function drawDrop(pen, { x, y }, { intensity, flopsPerS, isMeasured, kind }, roofs, palette) {
  if (!isMeasured) return;
  pen.strokeStyle = palette[kind === "decode" ? "accent" : "prompts"];
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  stroke(pen, [x(intensity), y(flopsPerS)], [x(intensity), y(roofAt(intensity, roofs))]);
  pen.setLineDash([]);
}

/** Draw a mark. Shapes differ, so that colour is never the only sign. */
export function drawMark(pen, left, top, { shape, kind }, palette) {
  const colour = kind === "decode" ? palette.accent : kind === "prompts" ? palette.prompts : palette.text;
  pen.beginPath();
  if (shape === "circle") pen.arc(left, top, MARK_PX, 0, 2 * Math.PI);
  else if (shape === "square") pen.rect(left - MARK_PX, top - MARK_PX, 2 * MARK_PX, 2 * MARK_PX);
  else {
    const reach = MARK_PX + 2;
    pen.moveTo(left, top - reach);
    pen.lineTo(left + reach, top);
    pen.lineTo(left, top + reach);
    pen.lineTo(left - reach, top);
    pen.closePath();
  }
  pen.fillStyle = shape === "diamond" ? palette.surface : colour;
  pen.fill();
  pen.lineWidth = 2;
  pen.strokeStyle = shape === "diamond" ? colour : palette.surface;
  pen.stroke();
}

function legendItem(shape, kind, name) {
  const sign = make("span", { className: "speed-sign", "aria-hidden": "true" });
  sign.dataset.shape = shape;
  sign.dataset.kind = kind;
  return make("li", {}, sign, name);
}

function label(seen, marks) {
  const { roofs } = seen;
  const parts = [
    tr("Roofline. Memory gives {rate}; {format} computes {peak}.", {
      rate: decimal(roofs.memory_bytes_per_s, "B/s"),
      format: roofs.weights_roof,
      peak: decimal(roofs.flops_per_s[roofs.weights_roof], "FLOP/s"),
    }),
    ...marks.map((it) => `${it.name()}: ${rateLines(it.intensity, it.flopsPerS, roofs).join(", ")}.`),
  ];
  return parts.join(" ");
}

// Draws a trace: lanes from top to bottom, time from left to right. Waits have a pattern and a colour of their own.

import { colours, ticks } from "../canvas.js";
import { duration } from "./format.js";
import { laneName } from "./lane_names.js";
import { firstAfter } from "./trace.js";

const ROW_PX = 20;
const LANE_GAP_PX = 8;
const AXIS_PX = 26;
const ENGINE_PX = 22;
const LEAST_LABEL_PX = 14; // wide spans have their name in them
const TICK_GAP_PX = 100;
const FONT = "11px system-ui, sans-serif";
const HATCH_PX = 6;
// Each is at 3:1 from the page in both schemes, and black text on it at 4.5:1. Lanes have names, so none needs colour.
const WORK = { passes: "#859290", attention: "#4a90d0", router: "#a08a1e", experts: "#d07a1a", sampling: "#b874a0" };
const OTHER_WORK = "#2f9a72";
const ON_WORK = "#000";

/** The colour of a lane's work. */
export const colourOf = (lane) => WORK[lane.name] ?? OTHER_WORK;

export class Picture {
  constructor() {
    this.trace = { lanes: [] };
    this.places = []; // of lanes: { lane, top }
    this.height = AXIS_PX;
    this.numDrawn = 0; // spans, in the last picture
  }

  setTrace(trace) {
    this.trace = trace;
    this.places = [];
    let top = AXIS_PX;
    let engine = "";
    for (const lane of trace.lanes) {
      const begins = trace.hasEngines && lane.engine !== engine;
      if (begins) top += ENGINE_PX;
      this.places.push({ lane, top, engine: begins ? lane.engine : "" });
      engine = lane.engine;
      top += lane.rows.length * ROW_PX + LANE_GAP_PX;
    }
    this.height = top;
  }

  /** Pixels that the names of lanes take. */
  gutter(width) {
    return width < 480 ? 76 : 112;
  }

  /** The moment at a pixel. */
  timeAt(x, width, { from, to }) {
    const gutter = this.gutter(width);
    return from + ((x - gutter) / (width - gutter)) * (to - from);
  }

  /** The span at a point, or else null; waits before the work under them. */
  spanAt(x, y, width, shown) {
    const place = this.places.find(({ lane, top }) => y >= top && y < top + lane.rows.length * ROW_PX);
    if (!place || x < this.gutter(width)) return null;
    const spans = place.lane.rows[Math.floor((y - place.top) / ROW_PX)];
    const time = this.timeAt(x, width, shown);
    const reach = (2 * (shown.to - shown.from)) / width;
    const found = [];
    for (let i = firstAfter(spans, time - reach); i < spans.length && spans[i].start <= time + reach; i += 1) {
      if (spans[i].end >= time - reach) found.push(spans[i]);
    }
    return found.find((span) => span.isBlocked) ?? found.at(-1) ?? null;
  }

  /** Where a span is, in pixels. */
  boxOf(span, width, { from, to }) {
    const gutter = this.gutter(width);
    const scale = (width - gutter) / (to - from);
    const { top } = this.places.find(({ lane }) => lane === span.lane);
    const left = Math.max(gutter + (span.start - from) * scale, gutter);
    const right = Math.min(gutter + (span.end - from) * scale, width);
    return { left, top: top + span.row * ROW_PX, width: Math.max(right - left, 1), height: ROW_PX - 2 };
  }

  draw(pen, width, shown, selected) {
    const theme = colours(pen.canvas, "text", "muted", "line", "ground", "wrong");
    const gutter = this.gutter(width);
    this.numDrawn = 0;
    pen.font = FONT;
    pen.lineWidth = 1;
    this.drawAxis(pen, width, shown, theme);
    pen.textBaseline = "middle";
    for (const { lane, top, engine } of this.places) {
      pen.textAlign = "left";
      pen.fillStyle = theme.text;
      if (engine) pen.fillText(engine, 0, top - ENGINE_PX / 2);
      pen.fillStyle = theme.muted;
      pen.fillText(laneName(lane), 0, top + ROW_PX / 2, gutter - 6);
    }
    pen.save();
    pen.beginPath();
    pen.rect(gutter, AXIS_PX, width - gutter, this.height);
    pen.clip();
    const wait = this.waitPattern(pen, theme);
    for (const { lane, top } of this.places) {
      lane.rows.forEach((spans, row) => this.drawRow(pen, spans, top + row * ROW_PX, { width, shown, wait, theme }));
    }
    if (selected) {
      const box = this.boxOf(selected, width, shown);
      pen.strokeStyle = theme.text;
      pen.lineWidth = 3;
      pen.strokeRect(box.left, box.top, box.width, box.height);
    }
    pen.restore();
  }

  drawAxis(pen, width, { from, to }, { muted, line }) {
    const gutter = this.gutter(width);
    pen.strokeStyle = line;
    pen.fillStyle = muted;
    pen.textBaseline = "top";
    pen.textAlign = "left";
    for (const time of ticks(from, to, Math.max(1, Math.round((width - gutter) / TICK_GAP_PX)))) {
      const x = Math.round(gutter + ((time - from) / (to - from)) * (width - gutter)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS_PX - 8);
      pen.lineTo(x, this.height);
      pen.stroke();
      const text = time ? duration(time) : "0";
      if (x + pen.measureText(text).width <= width) pen.fillText(text, x, 2);
    }
  }

  /** Draw the spans of a row that are in sight; of those that share a pixel only the first. */
  drawRow(pen, spans, top, { width, shown, wait, theme }) {
    const gutter = this.gutter(width);
    const { from, to } = shown;
    const scale = (width - gutter) / (to - from);
    const until = { work: -1, wait: -1 }; // the pixels that are full
    for (let i = firstAfter(spans, from); i < spans.length && spans[i].start < to; i += 1) {
      const span = spans[i];
      if (span.end < from) continue;
      const kind = span.isBlocked ? "wait" : "work";
      const left = Math.max(gutter + (span.start - from) * scale, gutter - 1);
      const right = Math.min(gutter + (span.end - from) * scale, width + 1);
      if (right <= until[kind]) continue;
      const size = Math.max(right - left, 1);
      until[kind] = left + size;
      this.numDrawn += 1;
      pen.fillStyle = span.isBlocked ? wait : colourOf(span.lane);
      pen.fillRect(left, top, size, ROW_PX - 2);
      if (size < 3) continue;
      pen.strokeStyle = span.isBlocked ? theme.wrong : theme.ground;
      pen.strokeRect(left + 0.5, top + 0.5, size - 1, ROW_PX - 3);
      if (!span.isBlocked && size >= LEAST_LABEL_PX) writeName(pen, span, left, top, size);
    }
  }

  waitPattern(pen, theme) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = HATCH_PX;
    const ink = tile.getContext("2d");
    ink.fillStyle = theme.ground;
    ink.fillRect(0, 0, HATCH_PX, HATCH_PX);
    ink.strokeStyle = theme.wrong;
    ink.lineWidth = 2;
    ink.beginPath();
    for (const shift of [-HATCH_PX, 0, HATCH_PX]) {
      ink.moveTo(shift, HATCH_PX);
      ink.lineTo(shift + HATCH_PX, 0);
    }
    ink.stroke();
    return pen.createPattern(tile, "repeat");
  }
}

/** Write the longest of a span's names that fits: the whole one, the kind of a pass, its layer. */
function writeName(pen, span, left, top, size) {
  const { layer } = span.args;
  const [kind] = span.name.match(/^part|^[\w ]+(?= pass of)/) ?? [""];
  const name = [span.name, kind, String(layer ?? "")].find((it) => it && pen.measureText(it).width <= size - 6);
  if (!name) return;
  pen.fillStyle = ON_WORK;
  pen.fillText(name, left + 3, top + ROW_PX / 2 - 1);
}

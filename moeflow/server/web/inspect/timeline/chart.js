// The time line that the user moves: picture, pointers, keys, and the details of a span.

import { Plot, setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";
import { tr } from "../../translate.js";
import { linesOf } from "./details.js";
import { Picture } from "./picture.js";
import { listen } from "./pointing.js";
import { TimeWindow } from "./time_window.js";

const ZOOM_STEP = 0.6;
const PAN_SHARE = 0.2; // of the time that is shown

export class Chart {
  /** `onMove()` is called when the user chooses another part or span; `announce(text)` is for screen readers. */
  constructor(describedBy, { onMove, announce }) {
    Object.assign(this, { onMove, announce });
    this.canvas = make("canvas", {
      className: "timeline-canvas",
      tabIndex: 0,
      role: "application",
      "aria-label": tr("Time line of the last passes"),
      "aria-describedby": describedBy,
    });
    this.shown = new TimeWindow();
    this.picture = new Picture();
    this.tooltip = new Tooltip();
    this.selected = null; // a span
    this.plot = new Plot(this.canvas, (pen, { width }) => this.draw(pen, width));
    listen(this.canvas, this);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.tooltip.hide());
  }

  /** Show another trace, all of it. */
  show(trace) {
    this.trace = trace;
    this.selected = null;
    this.tooltip.hide();
    this.picture.setTrace(trace);
    this.shown.setEnd(trace.end);
    setStyles(this.canvas, { height: `${this.picture.height}px` });
    this.plot.redraw();
  }

  draw(pen, width) {
    if (!this.shown.end) return;
    this.picture.draw(pen, width, this.shown, this.selected);
    this.canvas.dataset.drawn = this.picture.numDrawn;
  }

  get width() {
    return this.plot.size.width;
  }

  timeAt(x) {
    return this.picture.timeAt(x, this.width, this.shown);
  }

  zoom(factor, around) {
    this.shown.zoom(factor, around);
    this.moved();
  }

  zoomIn() {
    this.zoom(ZOOM_STEP, this.middle);
  }

  zoomOut() {
    this.zoom(1 / ZOOM_STEP, this.middle);
  }

  showAll() {
    this.shown.showAll();
    this.moved();
  }

  pan(us) {
    this.shown.pan(us);
    this.moved();
  }

  moved() {
    this.tooltip.hide();
    this.plot.redraw();
    this.onMove();
    if (this.isSelectedInSight && document.activeElement === this.canvas) this.showDetails();
  }

  get isSelectedInSight() {
    return this.selected && this.selected.end > this.shown.from && this.selected.start < this.shown.to;
  }

  /** The middle of the selected span, as far as there is one in sight. */
  get middle() {
    return this.isSelectedInSight ? (this.selected.start + this.selected.end) / 2 : undefined;
  }

  /** Show the details of the selected span below it. */
  showDetails() {
    const { left, top } = this.canvas.getBoundingClientRect();
    const box = this.picture.boxOf(this.selected, this.width, this.shown);
    const place = { x: left + box.left + Math.min(box.width, 60), y: top + box.top + box.height };
    this.tooltip.show(linesOf(this.selected), place, this.canvas);
  }

  hover(event) {
    const span = event && this.shown.end ? this.picture.spanAt(event.offsetX, event.offsetY, this.width, this.shown) : null;
    if (span) this.tooltip.show(linesOf(span), { x: event.clientX, y: event.clientY }, this.canvas);
    else this.tooltip.hide();
  }

  press(event) {
    this.canvas.focus();
    if (this.shown.end) this.select(this.picture.spanAt(event.offsetX, event.offsetY, this.width, this.shown));
  }

  /** Mark a span; null: none. */
  select(span) {
    this.selected = span;
    if (span) this.shown.reveal(span);
    this.moved();
    if (span) this.announce(linesOf(span).join(", "));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.shown.end) return;
    const pan = PAN_SHARE * (this.shown.to - this.shown.from);
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.pan(-pan) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.pan(pan) : this.step(1)),
      ArrowUp: () => this.stepLane(-1),
      ArrowDown: () => this.stepLane(1),
      Home: () => this.select(this.lane.spans[0]),
      End: () => this.select(this.lane.spans.at(-1)),
      Enter: () => this.zoomToSelected(),
      Escape: () => this.selected && this.select(null),
      "+": () => this.zoomIn(),
      "=": () => this.zoomIn(),
      "-": () => this.zoomOut(),
      0: () => this.showAll(),
    };
    const action = actions[event.key];
    if (!action) return;
    if (event.key === "Escape" && !this.selected) return; // it closes the inspector
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  get lane() {
    return this.selected?.lane ?? this.trace.lanes[0];
  }

  step(by) {
    const { spans } = this.lane;
    const place = this.selected ? spans.indexOf(this.selected) + by : spans.findIndex((it) => it.end > this.shown.from);
    this.select(spans[Math.min(Math.max(place, 0), spans.length - 1)]);
  }

  /** Go to the span of another lane at the same time. */
  stepLane(by) {
    const { lanes } = this.trace;
    const time = this.selected?.start ?? this.shown.from;
    const place = this.selected ? lanes.indexOf(this.lane) + by : 0;
    const { spans } = lanes[Math.min(Math.max(place, 0), lanes.length - 1)];
    this.select(spans.find((span) => span.end > time) ?? spans.at(-1));
  }

  zoomToSelected() {
    if (!this.selected) return;
    this.shown.zoomTo(this.selected);
    this.moved();
  }

  hide() {
    this.tooltip.hide();
  }
}

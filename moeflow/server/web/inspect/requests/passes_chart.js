// The passes of a request over time: how long each took, and how long it waited for experts.

import { formatNumber, textKey, tr } from "../../translate.js";
import { drawAxes } from "../axes.js";
import { colours, Plot } from "../canvas.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";
import { seconds } from "./format.js";

const HATCH_PX = 4;
const HEADS = [textKey("Pass"), textKey("Kind"), textKey("From"), textKey("Took"), textKey("Waited for experts"), textKey("Tokens"), textKey("Drafts right")];

export class PassesChart {
  constructor() {
    this.passes = [];
    this.chosen = null;
    this.canvas = make("canvas", { className: "passes-chart", tabIndex: 0, role: "img" });
    this.tooltip = new Tooltip();
    this.plot = new Plot(this.canvas, (pen, size) => this.draw(pen, size));
    this.rows = make("tbody");
    const head = make("thead", {}, make("tr", {}, ...HEADS.map((title) => make("th", { scope: "col", textContent: tr(title) }))));
    const table = make("table", { className: "story-table" }, head, this.rows);
    this.details = make("details", {}, make("summary", { textContent: tr("Passes as a table") }), make("div", { className: "story-box", tabIndex: 0, role: "region", "aria-label": tr("Passes") }, table));
    this.element = make("div", {}, this.canvas, legend(), this.details);
    this.details.addEventListener("toggle", () => this.list());
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX)));
    this.canvas.addEventListener("pointerleave", () => this.choose(null));
    this.canvas.addEventListener("blur", () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  show(passes) {
    this.passes = passes;
    const totalS = passes.reduce((sum, pass) => sum + pass.duration_s, 0);
    const stallS = passes.reduce((sum, pass) => sum + (pass.stall_s ?? 0), 0);
    this.canvas.setAttribute("aria-label", tr("{count} passes took {time}; {stall} of it were waits for experts. Arrow keys go from pass to pass.", { count: formatNumber(passes.length), time: seconds(totalS), stall: seconds(stallS) }));
    this.plot.redraw();
    this.list();
  }

  list() {
    if (!this.details.open) return;
    const lines = this.passes.map((pass, i) => [formatNumber(i + 1), kindName(pass), seconds(pass.start_s), seconds(pass.duration_s), seconds(pass.stall_s ?? 0), formatNumber(pass.tokens), draftsOf(pass)]);
    this.rows.replaceChildren(...lines.map(([number, ...texts]) => make("tr", {}, make("th", { scope: "row", textContent: number }), ...texts.map((text) => make("td", { textContent: text })))));
  }

  draw(pen, size) {
    const { passes } = this;
    if (!passes.length) return;
    const { accent, prompts, wrong, text } = colours(this.canvas, "accent", "prompts", "wrong", "text");
    const ends = passes.map((pass) => pass.start_s + pass.duration_s);
    const axis = (low, high) => ({ low, high, format: seconds });
    const place = drawAxes(pen, size, { x: axis(passes[0].start_s, Math.max(...ends)), y: axis(0, Math.max(...passes.map((pass) => pass.duration_s))) });
    this.place = place;
    passes.forEach((pass, i) => {
      const left = place.x(pass.start_s);
      const width = Math.max(1, place.x(ends[i]) - left - 1);
      const bar = (fromS, toS) => [left, place.y(toS), width, place.y(fromS) - place.y(toS)];
      const stallS = Math.min(pass.stall_s ?? 0, pass.duration_s);
      pen.fillStyle = pass.is_prompt ? prompts : accent;
      pen.fillRect(...bar(0, pass.duration_s - stallS));
      if (pass.is_prompt) hatch(pen, bar(0, pass.duration_s - stallS), text);
      pen.fillStyle = wrong;
      pen.fillRect(...bar(pass.duration_s - stallS, pass.duration_s));
      if (i !== this.chosen) return;
      pen.strokeStyle = text;
      pen.strokeRect(...bar(0, pass.duration_s));
    });
  }

  /** The pass at a place from the left, in CSS pixels; null: there is none. */
  at(x) {
    if (!this.place) return null;
    const found = this.passes.findLastIndex((pass) => this.place.x(pass.start_s) <= x + 1);
    return found < 0 ? null : found;
  }

  step(event) {
    const place = this.chosen ?? -1;
    const targets = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: this.passes.length - 1 };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(targets[event.key], 0), this.passes.length - 1));
  }

  choose(place) {
    if (place !== this.chosen) this.plot.redraw();
    this.chosen = place;
    const pass = this.passes[place];
    if (!pass) {
      this.tooltip.hide();
      return;
    }
    const { left, top } = this.canvas.getBoundingClientRect();
    const lines = [
      tr("Pass {number}: {kind}", { number: formatNumber(place + 1), kind: kindName(pass) }),
      tr("{time}, from {start} on", { time: seconds(pass.duration_s), start: seconds(pass.start_s) }),
      tr("{own} of the {all} tokens in the pass", { own: formatNumber(pass.tokens), all: formatNumber(pass.pass_tokens) }),
      ...(pass.drafted_tokens ? [tr("Drafts right: {drafts}", { drafts: draftsOf(pass) })] : []),
      ...(pass.stall_s ? [tr("Waited {time} for experts", { time: seconds(pass.stall_s) })] : []),
    ];
    this.tooltip.show(lines, { x: left + (this.place?.x(pass.start_s) ?? 0), y: top + 8 }, this.canvas);
  }

  hide() {
    this.choose(null);
  }
}

const kindName = (pass) => (pass.is_prompt ? tr("prompt") : tr("answer"));

const draftsOf = (pass) => (pass.drafted_tokens ? `${formatNumber(pass.accepted_tokens)} / ${formatNumber(pass.drafted_tokens)}` : "–");

function legend() {
  const entry = (kind, text) => make("li", {}, make("span", { className: "pass-mark", "data-kind": kind }), text);
  return make("ul", { className: "story-legend", "aria-label": tr("Legend") }, entry("prompt", tr("prompt")), entry("decode", tr("answer")), entry("stall", tr("waited for experts")));
}

/** Lines across a rectangle, so that colour is not all that tells it from others. */
function hatch(pen, [x, y, width, height], colour) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = colour;
  pen.globalAlpha = 0.5;
  for (let at = y; at < y + height; at += HATCH_PX) {
    pen.beginPath();
    pen.moveTo(x, Math.round(at) + 0.5);
    pen.lineTo(x + width, Math.round(at) + 0.5);
    pen.stroke();
  }
  pen.restore();
}

// Which lane of the engine did what in the last passes: a picture to zoom, its sums, and a file for Perfetto.

import { addStyles } from "../../add_styles.js";
import { make } from "../elements.js";
import { saveText } from "../../save_file.js";
import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { fillTable, scrolledTable } from "../tables.js";
import { Chart } from "./chart.js";
import { legend } from "./legend.js";
import { factsOf, spansIn, sumsOf } from "./tables.js";
import { readTrace } from "./trace.js";

const NUMBERS = [1, 4, 8, 16, 32, 64];
const USUAL_NUMBER = 8;
const RENEW_MS = 20_000; // the engine records for a minute after each question
const HINT_ID = "timeline-hint";
const EMPTY = { traceEvents: [] };

addStyles("./timeline.css", import.meta.url);

export default class TimelineView {
  static periodMs = 1000;

  constructor(element, { ask, announce }) {
    this.ask = ask;
    this.received = null; // the newest answer of the server that is shown
    this.askedMs = 0;
    this.numPasses = USUAL_NUMBER;
    this.chart = new Chart(HINT_ID, { onMove: () => this.pause(), announce });
    this.build(element);
    this.setLive(true);
  }

  build(element) {
    element.classList.add("timeline");
    this.live = this.button(tr("Live"), () => this.setLive(!this.isLive), "secondary");
    this.note = make("p", { className: "muted timeline-note" });
    this.facts = make("div", { className: "timeline-facts" });
    this.sums = scrolledTable(tr("Sums of the lanes"));
    this.spans = scrolledTable(tr("Spans in sight"));
    this.hint = make("p", { id: HINT_ID, className: "muted timeline-hint" });
    this.hint.textContent = tr("Drag to move. Zoom with two fingers, with Control and the wheel, or with + and -. Arrow keys go from span to span, Enter zooms to one, 0 shows all.");
    this.more = make("details", {}, make("summary", { textContent: tr("Spans as a table") }), this.spans.box);
    this.more.addEventListener("toggle", () => this.listSpans());
    this.content = make("div", { hidden: true }); // until there are passes
    this.content.append(
      this.chart.canvas,
      legend(),
      this.hint,
      make("h3", { textContent: tr("Sums") }),
      this.facts,
      this.sums.box,
      this.more,
    );
    const controls = [this.live, this.numberChoice(), ...this.zoomButtons(), this.exportButton()];
    element.append(make("div", { className: "timeline-controls" }, ...controls), this.note, this.content);
  }

  button(text, action, className = "quiet", properties = {}) {
    const button = make("button", { type: "button", className, textContent: text, ...properties });
    button.addEventListener("click", action);
    return button;
  }

  numberChoice() {
    const select = make("select", {}, ...NUMBERS.map((number) => make("option", { value: number, textContent: number })));
    select.value = USUAL_NUMBER;
    select.addEventListener("change", () => {
      this.numPasses = Number(select.value);
      this.setLive(true);
      this.update().catch(() => {}); // the next round reports it
    });
    return make("label", { className: "field" }, make("span", { textContent: tr("Last passes") }), select);
  }

  zoomButtons() {
    return [
      this.button("−", () => this.chart.zoomOut(), "quiet icon", { "aria-label": tr("Zoom out") }),
      this.button("+", () => this.chart.zoomIn(), "quiet icon", { "aria-label": tr("Zoom in") }),
      this.button(tr("Show all"), () => this.chart.showAll()),
    ];
  }

  exportButton() {
    this.exporter = this.button(tr("Export for Perfetto"), () => this.export(), "quiet", {
      title: tr("Save the passes as a file that ui.perfetto.dev opens"),
    });
    return this.exporter;
  }

  async update(signal) {
    if (!this.isLive && Date.now() < this.askedMs + RENEW_MS) return;
    this.askedMs = Date.now();
    const passes = this.isLive ? this.numPasses : 1;
    const received = await this.ask(`stats/timeline?passes=${passes}`, { signal });
    if (this.isLive) this.show(received);
  }

  show(received) {
    const before = this.received?.otherData;
    const { started_s, num_passes, note } = received.otherData;
    const isNew = !before || before.started_s !== started_s || before.num_passes !== num_passes;
    setText(this.note, note ? tr("Recording has begun. The passes of the next request appear here.") : this.state);
    if (!isNew) return;
    this.received = received;
    this.trace = readTrace(note ? EMPTY : received);
    this.exporter.disabled = this.content.hidden = Boolean(note);
    this.chart.show(this.trace);
    this.facts.replaceChildren(...factsOf(this.trace).map((text) => make("p", { textContent: text })));
    fillTable(this.sums.table, [tr("Lane"), tr("Worked"), tr("Waited"), tr("Share of the time")], sumsOf(this.trace));
    this.listSpans();
  }

  get state() {
    return this.isLive ? tr("New passes appear as they end.") : tr("Paused: the picture stays as it is.");
  }

  /** Follow new passes, or hold the picture. */
  setLive(isLive) {
    this.isLive = isLive;
    this.live.setAttribute("aria-pressed", String(isLive));
    setText(this.note, this.state);
  }

  /** Hold the picture, which the user looks at closely. */
  pause() {
    if (this.received) this.setLive(false);
    this.listSpans();
  }

  listSpans() {
    if (!this.more.open || !this.trace) return;
    const heads = [tr("Lane"), tr("Span"), tr("Begins"), tr("Takes"), tr("State"), tr("Bytes")];
    fillTable(this.spans.table, heads, spansIn(this.trace, this.chart.shown));
  }

  export() {
    const time = new Date(1000 * this.received.otherData.started_s).toISOString().slice(0, 19).replaceAll(":", "-");
    saveText(`moeflow-timeline-${time}.json`, "application/json", JSON.stringify(this.received));
  }

  hide() {
    this.chart.hide();
  }
}

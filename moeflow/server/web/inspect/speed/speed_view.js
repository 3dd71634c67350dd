// The speed of the model beside the roofs of the machine and beside its plan, and changes that would help.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { addStyles } from "../../add_styles.js";
import { make } from "../elements.js";
import { AdviceList } from "./advice.js";
import { Comparison } from "./comparison.js";
import { LastSeen } from "./last_seen.js";
import { MemoryBar } from "./memory_bar.js";
import { PointTable } from "./point_table.js";
import { Roofline } from "./roofline.js";
import { ago } from "./units.js";
import { Verdict } from "./verdict.js";

addStyles("./speed.css", import.meta.url);

export default class SpeedView {
  static periodMs = 2000;

  constructor(element, { ask, copy }) {
    this.ask = ask;
    this.last = new LastSeen();
    this.verdict = new Verdict();
    this.roofline = new Roofline();
    this.source = make("p", { className: "hint" });
    this.points = new PointTable();
    this.memory = new MemoryBar();
    this.comparison = new Comparison();
    this.advice = new AdviceList(copy);
    const heading = (text) => make("h3", { textContent: text });
    element.append(
      heading(tr("What limits the speed now")), this.verdict.element, this.roofline.element, this.source, this.points.element,
      heading(tr("Memory")), this.memory.element,
      heading(tr("Plan and measurement")), this.comparison.element,
      heading(tr("What would help most")), this.advice.element,
    );
    element.classList.add("speed-view");
  }

  async update(signal) {
    const seen = this.last.complete(await this.ask("stats/speed", { signal }));
    this.verdict.show(seen);
    this.roofline.show(seen);
    setText(this.source, sourceText(seen.roofs));
    this.points.show(seen);
    this.memory.show(seen.memory);
    this.comparison.show(seen.predicted);
    this.advice.show(seen.advice, seen.predicted.find((it) => it.figure === "memory_bytes")?.planned?.value ?? null, Boolean(seen.roofs?.is_disturbed));
  }

  hide() {
    this.roofline.tooltip.hide();
  }
}

/** Where the roofs are from. */
function sourceText(roofs) {
  if (!roofs || roofs.unknown) return "";
  const parts = [tr("Roofs of {processor}: {source}.", { processor: roofs.processor, source: sourceAge(roofs) })];
  if (roofs.is_disturbed) parts.push(tr("They may be too low: measure them again while nothing else runs (moeflow plan --recalibrate)."));
  return parts.join(" ");
}

function sourceAge({ source, age_s: ageS }) {
  return ageS === null ? source : `${source}, ${ago(ageS)}`;
}

// Where experts lie, and how often passes found them there.

import { expertFacts } from "../../experts.js";
import { listFacts, NONE } from "../../facts.js";
import { tr } from "../../translate.js";

export default class ExpertsView {
  static periodMs = 1000;

  constructor(element, { ask }) {
    this.ask = ask;
    this.facts = document.createElement("dl");
    this.facts.className = "facts";
    element.append(this.facts);
    this.before = null;
  }

  async update(signal) {
    const stats = await this.ask("stats", { signal });
    const facts = expertFacts(stats, this.before);
    listFacts(this.facts, facts.length ? facts : [[tr("Experts"), stats.model?.num_experts ? tr("all in memory") : NONE]]);
    this.before = stats;
  }
}

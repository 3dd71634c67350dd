// Where the experts lie, in numbers: each tier's total, how often passes found experts in memory, and what they waited.

import { listFacts } from "../../facts.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { expertFacts } from "./disk_facts.js";
import { count, percent } from "./format.js";
import { letterOf, tierColour, tierName, tierTotals } from "./tiers.js";
import { setStyles } from "../canvas.js";

export class Residency {
  constructor() {
    this.tiers = make("ul", { className: "tier-totals" });
    this.facts = make("dl", { className: "facts" });
    this.element = make("section", {}, make("h3", { textContent: tr("Where the experts lie") }), this.tiers, this.facts);
    this.before = null; // the reading of /stats before the newest
    this.newest = null;
  }

  /** `seen` is of /stats/experts, `stats` of /stats. */
  show(seen, stats) {
    if (stats !== this.newest) [this.before, this.newest] = [this.newest, stats];
    const totals = tierTotals(seen);
    const all = totals.reduce((sum, [, total]) => sum + total, 0);
    this.tiers.replaceChildren(...totals.map(([tier, total]) => tierItem(tier, total, all)));
    listFacts(this.facts, [...hitFacts(seen, stats), ...expertFacts(stats, this.before)]);
  }
}

function tierItem(tier, total, all) {
  const swatch = make("span", { className: "chip swatch", "aria-hidden": "true", textContent: letterOf(tier) });
  setStyles(swatch, { background: tierColour(tier) });
  return make("li", {}, swatch, tr("{tier}: {total} experts ({share})", { tier: tierName(tier), total: count(total), share: percent(total / all) }));
}

/** How often passes found an expert in memory. */
function hitFacts(seen, stats) {
  if (!stats?.expert_slots) return [];
  return [
    [tr("Hits"), count(stats.expert_hits_total)],
    [tr("Late: the read had begun"), count(stats.expert_late_total)],
    [tr("Misses"), count(stats.expert_misses_total)],
  ];
}

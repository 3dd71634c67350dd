// Where the experts lie, in numbers: each tier's total, hits and misses of passes, and the time that passes waited.

import { listFacts } from "../../facts.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { sum } from "./counts.js";
import { expertFacts } from "./disk_facts.js";
import { percent } from "./format.js";
import { tierName, tierTotals } from "./tiers.js";

export class Residency {
  constructor() {
    this.facts = make("dl", { className: "facts" });
    this.element = make("section", {}, make("h3", { textContent: tr("Where the experts lie") }), this.facts);
    this.before = null; // the reading of /stats before the newest
    this.newest = null;
  }

  /** `seen` is of /stats/experts, `stats` of /stats. */
  show(seen, stats) {
    if (stats !== this.newest) [this.before, this.newest] = [this.newest, stats];
    listFacts(this.facts, [...tierFacts(seen), ...hitFacts(stats), ...expertFacts(stats, this.before)]);
  }
}

/** How many experts each tier holds. */
function tierFacts(seen) {
  const totals = tierTotals(seen);
  const all = sum(totals.map(([, total]) => total));
  const text = (total) => tr("{total} experts ({share})", { total: formatNumber(total), share: percent(total / all) });
  return totals.map(([tier, total]) => [tierName(tier), text(total)]);
}

/** How often passes found an expert in memory. */
function hitFacts(stats) {
  if (!stats?.expert_slots) return [];
  return [
    [tr("Hits"), formatNumber(stats.expert_hits_total)],
    [tr("Late: the read had begun"), formatNumber(stats.expert_late_total)],
    [tr("Misses"), formatNumber(stats.expert_misses_total)],
  ];
}

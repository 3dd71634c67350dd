// How evenly each layer uses its experts: entropy, the busiest expert, idle experts.

import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { fillTable, scrolledTable } from "../tables.js";
import { layerFacts, sum } from "./counts.js";
import { percent, ratio } from "./format.js";

export class LayersSummary {
  constructor() {
    const { table, box } = scrolledTable(tr("Every layer"));
    this.table = table;
    this.sentences = make("p");
    this.details = make("details", {}, make("summary", { textContent: tr("Every layer") }), box);
    this.details.addEventListener("toggle", () => this.showRows());
    const title = make("h3", { textContent: tr("How evenly layers use their experts") });
    this.element = make("section", {}, title, this.sentences, this.details);
  }

  /** `layers` are the numbers of the rows of `counts`. */
  show(layers, counts, topK) {
    this.facts = counts.map(layerFacts);
    Object.assign(this, { layers, topK, numExperts: counts[0].length });
    setText(this.sentences, [this.evenness(), this.busiest(), this.idle()].join(" "));
    this.showRows();
  }

  evenness() {
    const mean = sum(this.facts.map(({ effective }) => effective)) / this.facts.length;
    const values = { used: ratio(mean), all: this.numExperts };
    return tr("On average, a layer spreads its tokens as if it used {used} of its {all} experts evenly.", values);
  }

  busiest() {
    const shares = this.facts.map((it) => this.shareOfTokens(it));
    const row = shares.indexOf(Math.max(...shares));
    const values = {
      expert: this.facts[row].busiest,
      layer: this.layers[row],
      share: percent(shares[row]),
      even: percent(this.topK / this.numExperts),
    };
    return tr("The busiest is expert {expert} of layer {layer}: {share} of the tokens chose it, and {even} would be even.", values);
  }

  idle() {
    const numIdle = sum(this.facts.map((it) => it.numIdle));
    if (!numIdle) return tr("Every expert was chosen at least once.");
    const values = { idle: formatNumber(numIdle), all: formatNumber(this.numExperts * this.facts.length) };
    return tr("Of {all} experts, {idle} were not chosen.", values);
  }

  /** Each token chooses `topK` experts, so the shares of a layer add up to `topK`. */
  shareOfTokens({ busiestTokens, total }) {
    return total ? (busiestTokens * this.topK) / total : 0;
  }

  showRows() {
    if (!this.details.open) return;
    const heads = [tr("Layer"), tr("Used like"), tr("Entropy"), tr("Busiest"), tr("Idle")];
    fillTable(this.table, heads, this.facts.map((it, row) => this.rowOf(it, this.layers[row])));
  }

  rowOf(it, layer) {
    return [
      String(layer),
      tr("{used} of {all}", { used: ratio(it.effective), all: this.numExperts }),
      tr("{bits} bits", { bits: ratio(it.entropyBits) }),
      tr("expert {expert}: {share}", { expert: it.busiest, share: percent(this.shareOfTokens(it)) }),
      formatNumber(it.numIdle),
    ];
  }
}

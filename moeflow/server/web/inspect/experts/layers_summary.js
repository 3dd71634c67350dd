// What the counts of each layer tell: how evenly its experts are used, the busiest, the idle ones.

import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { layerFacts } from "./counts.js";
import { count, percent, ratio } from "./format.js";

export class LayersSummary {
  constructor() {
    this.sentences = make("p", {});
    this.head = make("tr", {}, ...[tr("Layer"), tr("Used like"), tr("Entropy"), tr("Busiest"), tr("Idle")].map((text) => make("th", { scope: "col", textContent: text })));
    this.rows = make("tbody");
    const table = make("table", { className: "numbers-table" }, make("thead", {}, this.head), this.rows);
    this.details = make("details", {}, make("summary", { textContent: tr("Every layer") }), make("div", { className: "table-box", tabIndex: 0, role: "region", "aria-label": tr("Every layer") }, table));
    this.element = make("section", {}, make("h3", { textContent: tr("How evenly layers use their experts") }), this.sentences, this.details);
    this.details.addEventListener("toggle", () => this.showRows());
  }

  /** `layers` are the numbers of the rows of `counts`. */
  show(layers, counts, topK) {
    this.facts = counts.map(layerFacts);
    Object.assign(this, { layers, topK, numExperts: counts[0].length });
    this.sentences.textContent = this.sentence();
    this.showRows();
  }

  sentence() {
    const { facts, numExperts, topK } = this;
    const mean = facts.reduce((all, { effective }) => all + effective, 0) / facts.length;
    const most = facts.reduce((best, it, row) => (it.busiestTokens / it.total > facts[best].busiestTokens / facts[best].total ? row : best), 0);
    const numIdle = facts.reduce((all, it) => all + it.numIdle, 0);
    const share = this.shareOfTokens(facts[most]);
    return [
      tr("A layer spreads its tokens as if {used} of its {all} experts were used evenly, on average.", { used: ratio(mean), all: numExperts }),
      tr("The busiest is expert {expert} of layer {layer}: {share} of the tokens chose it, and {even} would be even.", { expert: facts[most].busiest, layer: this.layers[most], share: percent(share), even: percent(topK / numExperts) }),
      numIdle ? tr("{idle} of {all} experts were not chosen at all.", { idle: count(numIdle), all: count(numExperts * facts.length) }) : tr("Every expert was chosen at least once."),
    ].join(" ");
  }

  /** Each token chooses `topK` experts, so that shares of a layer add up to `topK`. */
  shareOfTokens({ busiestTokens, total }) {
    return total ? (busiestTokens * this.topK) / total : 0;
  }

  showRows() {
    if (!this.details.open) return;
    this.rows.replaceChildren(
      ...this.facts.map((it, row) =>
        make(
          "tr",
          {},
          make("th", { scope: "row", textContent: this.layers[row] }),
          ...[
            tr("{used} of {all}", { used: ratio(it.effective), all: this.numExperts }),
            tr("{bits} bits", { bits: ratio(it.entropyBits) }),
            tr("expert {expert}: {share}", { expert: it.busiest, share: percent(this.shareOfTokens(it)) }),
            count(it.numIdle),
          ].map((text) => make("td", { textContent: text })),
        ),
      ),
    );
  }
}

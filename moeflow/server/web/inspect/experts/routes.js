// The tokens of one answer with the experts that each of them chose, from /stats/requests/{id}/tokens.

import { tr } from "../../translate.js";

const NOT_COMPUTED = 65535; // an expert number that the server sends for a layer without a choice

export class Routes {
  constructor({ layers, num_experts: numExperts, top_k: topK, tokens }) {
    Object.assign(this, { layers, numExperts, topK });
    this.tokens = tokens.map(({ text, role, experts }) => ({ text, role, experts: experts && decode(experts) }));
  }

  /** The experts of a token at the layer of this row, the one with the largest weight first; [] if it was not counted. */
  chosen(token, row) {
    const { experts } = this.tokens[token];
    if (!experts) return [];
    return [...experts.subarray(row * this.topK, (row + 1) * this.topK)].filter((expert) => expert !== NOT_COMPUTED);
  }

  /** All that a token chose, as cells of the map: [[row, expert], …]. */
  cells(token) {
    return this.layers.flatMap((_, row) => this.chosen(token, row).map((expert) => [row, expert]));
  }

  /** For each expert, how many tokens have it among their first `most` at this row. */
  counts(row, most = 1) {
    const counts = new Array(this.numExperts).fill(0);
    for (const token of this.tokens.keys()) {
      for (const expert of this.chosen(token, row).slice(0, most)) counts[expert] += 1;
    }
    return counts;
  }

  /** Texts of tokens that chose an expert, with how often, the most frequent first: [[text, count], …]. */
  textsOf(row, expert) {
    const counts = new Map();
    for (const [token, { text }] of this.tokens.entries()) {
      if (this.chosen(token, row).includes(expert)) counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    return [...counts].sort(([, one], [, other]) => other - one);
  }

  get numWithout() {
    return this.tokens.filter(({ experts }) => !experts).length;
  }

  /** Why a token has no experts. */
  reason(token) {
    if (token === this.tokens.length - 1) return tr("Not computed: no token follows it.");
    const firstCounted = this.tokens.findIndex(({ experts }) => experts);
    if (firstCounted < 0 || token > firstCounted) return tr("Not counted: nobody was looking then.");
    return tr("Not computed: found in the prefix cache.");
  }
}

/** Little-endian uint16 in base64. */
function decode(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.codePointAt(0));
  return new Uint16Array(bytes.buffer);
}

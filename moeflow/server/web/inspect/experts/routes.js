// The tokens of one answer with the experts that each of them chose, from /stats/requests/{id}/tokens.

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

  /** For each expert, how many tokens have it first at this row. */
  firstCounts(row) {
    const counts = new Array(this.numExperts).fill(0);
    for (const token of this.tokens.keys()) {
      const [first] = this.chosen(token, row);
      if (first !== undefined) counts[first] += 1;
    }
    return counts;
  }
}

/** Little-endian uint16 in base64. */
function decode(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.codePointAt(0));
  return new Uint16Array(bytes.buffer);
}

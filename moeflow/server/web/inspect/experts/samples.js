// Readings of the counts while the view is open: how the share of an expert changes.

const KEPT_S = 240;
const WINDOW_S = 10; // a point of the line is the share over so long

export class Samples {
  constructor() {
    this.kept = []; // { timeS, tokens, counts: [layers * experts] }, both counted since counting began
  }

  /** Add the counts until now. Without new tokens the last reading still holds. */
  add(timeS, { tokens, counts }) {
    const last = this.kept.at(-1);
    const numCells = counts.length * (counts[0]?.length ?? 0);
    if (last && (tokens < last.tokens || last.counts.length !== numCells)) this.kept = []; // another model or a new count
    else if (last?.tokens === tokens) this.kept.pop();
    this.kept.push({ timeS, tokens, counts: Uint32Array.from(counts.flat()) });
    while (this.kept[0].timeS < timeS - KEPT_S) this.kept.shift();
  }

  /** The share of tokens that chose the expert of this place, in time: [[seconds from now, share], …]. */
  shares(place, nowS) {
    const points = [];
    for (let first = 0, i = 1; i < this.kept.length; i += 1) {
      const { timeS, tokens, counts } = this.kept[i];
      while (first < i - 1 && this.kept[first].timeS < timeS - WINDOW_S) first += 1;
      const before = this.kept[first];
      points.push([timeS - nowS, (counts[place] - before.counts[place]) / (tokens - before.tokens)]);
    }
    return points;
  }
}

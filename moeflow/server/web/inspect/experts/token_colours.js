// Which experts have a colour of their own. Of many experts those do that most tokens of a layer chose first; one that
// stays among them keeps its colour while an answer grows.

import { AREAS, REST } from "./palette.js";

export class TokenColours {
  constructor() {
    this.places = new Map(); // from an expert to the place of its colour
  }

  reset() {
    this.places.clear();
  }

  /** Choose by the counts of a layer, [num_experts]; return whether anything has changed. */
  update(counts) {
    const before = JSON.stringify([...this.places]);
    const ranked = [...counts.keys()].filter((expert) => counts[expert]).sort((a, b) => counts[b] - counts[a]);
    const wanted = counts.length <= AREAS.length ? [...counts.keys()] : ranked.slice(0, AREAS.length);
    for (const expert of this.places.keys()) if (!wanted.includes(expert)) this.places.delete(expert);
    const free = [...AREAS.keys()].filter((place) => ![...this.places.values()].includes(place));
    for (const expert of wanted) if (!this.places.has(expert)) this.places.set(expert, free.shift());
    return JSON.stringify([...this.places]) !== before;
  }

  /** The colour of an expert. */
  of(expert) {
    return AREAS[this.places.get(expert)] ?? REST;
  }
}

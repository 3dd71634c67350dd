// The choice between all replicas and one of them.

import { tr } from "../../translate.js";
import { make } from "../elements.js";

const ALL = "all";

export class ReplicaChoice {
  /** `onChoose()`: another one is shown from now on. */
  constructor(onChoose) {
    this.element = make("select", { "aria-label": tr("Replica"), hidden: true });
    this.element.addEventListener("change", onChoose);
  }

  /** The chosen part of an answer of /stats/experts. */
  pick(seen) {
    const { replicas } = seen;
    if (this.element.options.length !== replicas.length + 1) this.offer(replicas.length);
    this.element.hidden = !replicas.length;
    return { ...seen, ...replicas[this.element.value] };
  }

  offer(numReplicas) {
    const numbers = Array.from({ length: numReplicas }, (_, number) => number);
    this.element.replaceChildren(
      make("option", { value: ALL, textContent: tr("All replicas, places of the first") }),
      ...numbers.map((number) => make("option", { value: number, textContent: tr("Replica {number}", { number }) })),
    );
  }
}

// Over which tokens the experts are counted.

import { textKey, tr } from "../../translate.js";
import { addCounts, sum } from "./counts.js";

export const RANGES = [
  ["last_pass", textKey("Last pass")],
  ["last_minute", textKey("Last minute")],
  ["conversation", textKey("This conversation")],
  ["answer", textKey("Shown answer")],
  ["total", textKey("Since counting began")],
];

/** Counts of the answers of the open conversation, kept once they are complete. */
export class ConversationCounts {
  constructor(ask, chat) {
    Object.assign(this, { ask, chat });
    this.known = new Map(); // from a request's id to { model, counts } of a complete answer, null: the server has none
  }

  /** Read the answers of one model. Returns { tokens, counts, note }: `note` reports answers that are not counted. */
  async read({ model, top_k: topK }, signal) {
    const answers = this.chat.turns.map(({ answer }) => answer).filter((answer) => answer?.requestId);
    const found = [];
    for (const answer of answers) found.push(await this.countsOf(answer, signal)); // most are known
    const own = found.filter((it) => !it || it.model === model);
    const counted = own.filter(Boolean);
    const counts = addCounts(counted.map((it) => it.counts));
    const note = noteOf({ numAnswers: own.length, numCounted: counted.length, numOthers: found.length - own.length });
    return { counts, tokens: counts.length ? sum(counts[0]) / topK : 0, note };
  }

  async countsOf({ requestId, state }, signal) {
    if (this.known.has(requestId)) return this.known.get(requestId);
    let counts = null;
    try {
      const { model, experts } = await this.ask(`stats/requests/${encodeURIComponent(requestId)}`, { signal });
      if (experts) counts = { model, counts: experts.counts }; // else nobody watched
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    if (state !== "running") this.known.set(requestId, counts);
    return counts;
  }
}

function noteOf({ numAnswers, numCounted, numOthers }) {
  if (!numAnswers && !numOthers) return tr("This conversation has no answers yet.");
  const parts = [];
  if (numCounted < numAnswers) {
    parts.push(tr("{counted} of {all} answers are counted.", { counted: numCounted, all: numAnswers }));
    parts.push(tr("The server counts while a page is open, and keeps its last 200 requests."));
  }
  if (numOthers) parts.push(tr("Answers of other models are left out: {count}.", { count: numOthers }));
  return parts.join(" ");
}

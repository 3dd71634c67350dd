// Over which tokens the experts are counted.

import { textKey, tr } from "../../translate.js";
import { addCounts, sum } from "./counts.js";

export const RANGES = [
  ["last_pass", textKey("Last pass")],
  ["last_minute", textKey("Last minute")],
  ["conversation", textKey("This conversation")],
  ["total", textKey("Since counting began")],
];

/** Counts of the answers of the open conversation, kept once they are complete. */
export class ConversationCounts {
  constructor(ask, chat) {
    Object.assign(this, { ask, chat });
    this.known = new Map(); // from a request's id to the counts of a complete answer, null: the server has none
  }

  /** Returns { tokens, counts, note }: `note` reports answers that are not counted. */
  async read(topK, signal) {
    const answers = this.chat.turns.map(({ answer }) => answer).filter((answer) => answer?.requestId);
    const found = [];
    for (const answer of answers) found.push(await this.countsOf(answer, signal)); // most are known
    const counted = found.filter(Boolean);
    const counts = addCounts(counted);
    return { counts, tokens: counts.length ? sum(counts[0]) / topK : 0, note: noteOf(answers.length, counted.length) };
  }

  async countsOf({ requestId, state }, signal) {
    if (this.known.has(requestId)) return this.known.get(requestId);
    let counts = null;
    try {
      const { experts } = await this.ask(`stats/requests/${encodeURIComponent(requestId)}`, { signal });
      counts = experts?.counts ?? null; // null: nobody watched
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    if (state !== "running") this.known.set(requestId, counts);
    return counts;
  }
}

function noteOf(numAnswers, numCounted) {
  if (!numAnswers) return tr("This conversation has no answers yet.");
  if (numCounted === numAnswers) return "";
  const reason = tr("The server counts while a page is open, and keeps its last 200 requests.");
  return `${tr("{counted} of {all} answers are counted.", { counted: numCounted, all: numAnswers })} ${reason}`;
}

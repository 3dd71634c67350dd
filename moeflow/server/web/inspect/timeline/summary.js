// What a trace adds up to: how long lanes worked and waited.

/** Return, of each lane, { lane, busy, blocked, share }: microseconds, and the share of the whole time in which it
 *  worked. Where several threads of a lane work at once, that time counts once. */
export function summarise({ lanes, end }) {
  return lanes.map((lane) => {
    const blocked = covered(lane.spans.filter((span) => span.isBlocked));
    const work = covered(lane.spans);
    return { lane, busy: work - blocked, blocked, share: end ? (work - blocked) / end : 0 };
  });
}

/** Return the share of the passes' time in which they waited, in any lane of the thread that computes; null: no pass. */
export function waitedShare({ lanes, passes }) {
  const total = passes.reduce((sum, pass) => sum + pass.end - pass.start, 0);
  if (!total) return null;
  const waits = lanes.map((lane) => covered(lane.spans.filter((span) => span.isBlocked)));
  return waits.reduce((sum, wait) => sum + wait, 0) / total;
}

/** Return the longest pass; undefined: there is none. */
export function longest(passes) {
  return passes.toSorted((one, other) => other.end - other.start - (one.end - one.start))[0];
}

/** The time that spans, sorted by start, cover together. */
export function covered(spans) {
  let total = 0;
  let until = -Infinity;
  for (const { start, end } of spans) {
    if (end > until) total += end - Math.max(start, until);
    until = Math.max(until, end);
  }
  return total;
}

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

/** Return the causes of waits with the share of the passes' time that each took, the largest first: [cause, share]. */
export function waits({ lanes, passes }) {
  const total = passes.reduce((sum, pass) => sum + pass.end - pass.start, 0);
  const causes = new Map();
  for (const lane of lanes) {
    const byCause = Map.groupBy(lane.spans.filter((span) => span.isBlocked), causeOf);
    for (const [cause, spans] of byCause) causes.set(cause, (causes.get(cause) ?? 0) + covered(spans) / total);
  }
  return [...causes].sort((one, other) => other[1] - one[1]);
}

/** "waits for experts 3" -> "waits for experts"; likewise what follows a colon is left out. */
const causeOf = ({ name }) => name.replace(/(:.*| [\d.]+)$/, "");

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

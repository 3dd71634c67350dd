// Reads Perfetto's JSON of `stats/timeline`: lanes with rows of spans. Times are microseconds since the first span.
//
// A span is { name, start, end, isBlocked, args, thread, lane, row }. A lane is { name, engine, threads, spans, rows }:
// `rows` has the same spans in as few rows as show each of them, except that waits may lie upon work.

/** Return { lanes, passes, end, hasEngines }; only lanes with spans. */
export function readTrace({ traceEvents }) {
  const threads = new Map();
  const engines = new Map();
  const lanes = new Map();
  for (const { ph, name, pid, tid, args } of traceEvents) {
    if (ph !== "M") continue;
    if (name === "process_name") engines.set(pid, args.name);
    if (name === "thread_name") threads.set(`${pid}.${tid}`, { name: args.name, laneName: args.lane, spans: [] });
  }
  for (const event of traceEvents) {
    if (event.ph === "X") threads.get(`${event.pid}.${event.tid}`).spans.push(spanOf(event));
  }
  for (const [key, thread] of threads) {
    const pid = Number(key.split(".")[0]);
    const laneKey = `${pid}.${thread.laneName}`;
    if (!lanes.has(laneKey)) lanes.set(laneKey, { name: thread.laneName, engine: engines.get(pid) ?? "", threads: [] });
    lanes.get(laneKey).threads.push(thread);
  }
  const all = [...lanes.values()].filter(({ threads }) => threads.some((thread) => thread.spans.length));
  all.forEach(fill);
  const spans = all.flatMap((lane) => lane.spans);
  return {
    lanes: all,
    passes: all.filter((lane) => lane.name === "passes").flatMap((lane) => lane.spans),
    end: spans.reduce((end, span) => Math.max(end, span.end), 0),
    hasEngines: engines.size > 1,
  };
}

function spanOf({ name, ts, dur, cat, args }) {
  return { name, start: ts, end: ts + dur, isBlocked: cat === "blocked", args };
}

function fill(lane) {
  const outer = [];
  for (const thread of lane.threads) {
    thread.spans.sort(byStart);
    let holder = null; // of the spans that lie within it
    for (const span of thread.spans) {
      Object.assign(span, { thread: thread.name, lane, holder: null });
      if (holder && span.end <= holder.end) span.holder = holder;
      else outer.push((holder = span));
    }
  }
  const ends = []; // of the rows
  for (const span of outer.sort(byStart)) {
    const free = ends.findIndex((end) => end <= span.start);
    span.row = free < 0 ? ends.length : free;
    ends[span.row] = span.end;
  }
  lane.spans = lane.threads.flatMap((thread) => thread.spans).sort(byStart);
  lane.rows = Array.from({ length: Math.max(ends.length, 1) }, () => []);
  for (const span of lane.spans) {
    span.row = (span.holder ?? span).row;
    lane.rows[span.row].push(span);
  }
}

const byStart = (one, other) => one.start - other.start || other.end - one.end;

/** The first index of spans sorted by start from which on one may end after `time`. */
export function firstAfter(spans, time) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].start < time) low = middle + 1;
    else high = middle;
  }
  while (low > 0 && (spans[low - 1].end > time || spans[low - 1].holder?.end > time)) low -= 1;
  return low;
}

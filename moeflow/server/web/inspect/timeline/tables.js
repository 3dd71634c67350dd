// The time line as texts for tables: sums of each lane, and the spans in sight.

import { NONE } from "../../facts.js";
import { tr } from "../../translate.js";
import { duration, percent, quantity } from "./format.js";
import { causeName, laneName } from "./lane_names.js";
import { firstAfter } from "./trace.js";
import { longest, summarise, waits } from "./summary.js";

const MAX_ROWS = 500;
const PART = "part of a pass"; // a rank's, of a pass that its engine has, too

/** Rows of the sums of lanes: texts. */
export function sumsOf(trace) {
  return summarise(trace).map(({ lane, busy, blocked, share }) => [
    laneName(lane, trace.hasEngines),
    busy ? duration(busy) : NONE,
    blocked ? duration(blocked) : NONE,
    percent(share),
  ]);
}

/** Sentences about all passes. */
export function factsOf(trace) {
  const pass = longest(trace.passes);
  if (!pass) return [];
  const count = trace.passes.filter(({ name }) => !name.startsWith(PART)).length;
  const causes = waits(trace);
  const share = percent(causes.reduce((sum, [, one]) => sum + one, 0));
  return [
    tr("Passes shown: {count}. They waited {share} of their time.", { count, share }),
    ...causes.map(([cause, one]) => `${causeName(cause)}: ${percent(one)}`),
    tr("The longest one took {duration}: {name}.", { duration: duration(pass.end - pass.start), name: pass.name }),
  ];
}

/** Rows of the spans in a part of the time, at most MAX_ROWS: texts. */
export function spansIn(trace, { from, to }) {
  const spans = trace.lanes.flatMap((lane) => {
    const first = firstAfter(lane.spans, from);
    return lane.spans.slice(first).filter((span) => span.start < to && span.end > from);
  });
  spans.sort((one, other) => one.start - other.start);
  return spans.slice(0, MAX_ROWS).map((span) => [
    laneName(span.lane, trace.hasEngines),
    span.name,
    duration(span.start),
    duration(span.end - span.start),
    span.isBlocked ? tr("waits") : tr("works"),
    span.args.bytes ? quantity(span.args.bytes, "B") : NONE,
  ]);
}

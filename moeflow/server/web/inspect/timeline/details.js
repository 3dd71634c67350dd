// The details of one span, as texts.

import { tr } from "../../translate.js";
import { duration, quantity } from "./format.js";

/** Lines of text: the name first. */
export function linesOf(span) {
  const { args, start, end } = span;
  const seconds = (end - start) / 1e6;
  const lines = [span.name, tr("{duration}, begins at {start}", { duration: duration(end - start), start: duration(start) })];
  if (span.isBlocked) lines.push(tr("It waits."));
  if (args.bytes) {
    const values = { bytes: quantity(args.bytes, "B"), rate: quantity(args.bytes / seconds, "B/s") };
    lines.push(tr("{bytes}, {rate}", values));
  }
  if (args.flops) {
    const values = { flops: quantity(args.flops, "FLOP"), rate: quantity(args.flops / seconds, "FLOP/s") };
    lines.push(tr("{flops}, {rate}", values));
  }
  if (args.micro_batch !== undefined) lines.push(tr("Micro-batch {number}", { number: args.micro_batch }));
  if (span.thread !== span.lane.name) lines.push(tr("Thread {name}", { name: span.thread }));
  return lines;
}

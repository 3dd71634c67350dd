// In sentences: what limits the speed now, and why.

import { make } from "../elements.js";
import { setText } from "../../set_text.js";
import { formatPercent, tr } from "../../translate.js";
import { ago, decimal, digits, seconds } from "./units.js";

const STALE_S = 10;
const MANY = 0.1; // of the processor, from which on other programs are worth a word

export class Verdict {
  constructor() {
    this.tag = make("strong", { className: "speed-tag" });
    this.text = make("p", { className: "speed-verdict" });
    this.more = make("p", { className: "hint" });
    this.element = make("div", {}, this.tag, this.text, this.more);
  }

  /** `seen` is the answer of /stats/speed. */
  show(seen) {
    const { now, model, roofs } = seen;
    const point = newest(now);
    this.tag.hidden = !point?.binds;
    if (point?.binds) setText(this.tag, bindingName(point.binds));
    setText(this.text, point ? pointText(point, now, roofs) : idleText(seen));
    setText(this.more, point ? moreText(point, now, roofs) : model ? modelText(model, roofs) : "");
  }
}

/** The kind of passes that ended last. */
export function newest({ decode, prompts }) {
  if (!decode || !prompts) return decode ?? prompts;
  return decode.age_s <= prompts.age_s ? decode : prompts;
}

export function bindingName(binds) {
  const names = {
    memory: tr("The limit now: memory speed"),
    compute: tr("The limit now: arithmetic"),
    disk: tr("The limit now: the disk"),
    exchange: tr("The limit now: exchange between processes"),
  };
  return names[binds];
}

function pointText(point, now, roofs) {
  const isDecoding = point === now.decode;
  const values = {
    bytes: decimal(point.bytes_per_pass, "B"),
    flops: decimal(point.flops_per_pass, "FLOP"),
    requests: digits(point.sequences_per_pass),
    tokens: digits(point.tokens_per_pass),
    time: seconds(point.pass_s),
    speed: digits(point.generated_per_s),
  };
  const what = isDecoding
    ? point.sequences_per_pass > 1.05
      ? tr("A step for {requests} requests reads {bytes} of weights, keys and values.", values)
      : tr("Decoding reads {bytes} of weights, keys and values a token.", values)
    : tr("A pass of {tokens} prompt tokens reads {bytes} and computes {flops}.", values);
  const parts = [what];
  if (point.binds === "disk") parts.push(tr("It waits {wait} for experts from disk.", { wait: seconds(point.stall_s) }));
  else if (point.binds === "exchange") parts.push(tr("It waits {wait} for other processes.", { wait: seconds(point.waited_s) }));
  else if (point.binds) parts.push(roofText(point, isDecoding, roofs));
  parts.push(isDecoding ? tr("Measured: {speed} tokens/s.", values) : tr("Measured: {time} a pass.", values));
  return parts.join(" ");
}

function roofText(point, isDecoding, roofs) {
  const values = {
    rate: point.binds === "memory" ? decimal(roofs.memory_bytes_per_s, "B/s") : decimal(roofs.flops_per_s[roofs.weights_roof], "FLOP/s"),
    speed: digits((point.num_engines * point.sequences_per_pass) / point.roof_pass_s),
    time: seconds(point.roof_pass_s),
  };
  if (point.binds === "memory") {
    return isDecoding
      ? tr("Memory gives {rate}: the roof is {speed} tokens/s.", values)
      : tr("Memory gives {rate}: the roof is {time} a pass.", values);
  }
  return isDecoding
    ? tr("The processor computes {rate}: the roof is {speed} tokens/s.", values)
    : tr("The processor computes {rate}: the roof is {time} a pass.", values);
}

function moreText(point, { other_programs: others }, roofs) {
  const parts = [];
  if (point.share_of_roof !== null) {
    const share = formatPercent(point.share_of_roof);
    parts.push(
      point.share_of_roof > 1
        ? tr("That is {share} of the roof: the machine was measured slower than it is now.", { share })
        : tr("That is {share} of the roof. The rest goes to kernels that do not reach it, and to work between them.", { share }),
    );
  } else if (roofs?.unknown) {
    parts.push(tr("Roofs are not known: {reason}", { reason: roofs.unknown }));
  }
  if (others > MANY) parts.push(tr("Other programs have {share} of the processor, which slows passes.", { share: formatPercent(others) }));
  if (point.distinct_experts !== null) {
    parts.push(tr("A pass uses {count} experts of a layer, as counted.", { count: digits(point.distinct_experts) }));
  } else if (point.expected_experts !== null) {
    parts.push(tr("A pass is taken to use {count} experts of a layer, as routers are expected to choose.", { count: digits(point.expected_experts) }));
  }
  if (point.age_s > STALE_S) parts.push(tr("The last such pass ended {age}.", { age: ago(point.age_s) }));
  return parts.join(" ");
}

function idleText({ now, unknown }) {
  if (unknown) return tr("Nothing is known: {reason}", { reason: unknown });
  return now.unknown === "no pass in the last minute"
    ? tr("Nothing has run in the last minute. Ask something, and watch.")
    : tr("No engine answers now.");
}

/** What one token takes, before anything has run. */
function modelText(model, roofs) {
  const bytes = decimal(model.active_bytes_per_token, "B");
  if (!roofs?.memory_bytes_per_s) return tr("A token reads {bytes} of weights.", { bytes });
  const rate = decimal(roofs.memory_bytes_per_s, "B/s");
  const speed = digits(roofs.memory_bytes_per_s / model.active_bytes_per_token);
  return tr("A token reads {bytes} of weights. Memory gives {rate}: the roof for one request is {speed} tokens/s.", { bytes, rate, speed });
}

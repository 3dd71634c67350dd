// Writes what the server and the last answer tell in numbers: the model's facts and the live row.

import { setText } from "./set_text.js";
import { formatNumber, formatPercent, language, tr } from "./translate.js";

export const NONE = "–";
const MAX_STRIP = 64; // more bars than this say nothing to the eye

/** 134515008 -> "135M", 46702792704 -> "46.7B" */
export function formatCount(count) {
  const units = [[1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const [factor, unit] = units.find(([least]) => count >= least) ?? [1, ""];
  return `${(count / factor).toLocaleString(language(), { maximumSignificantDigits: 3 })}${unit}`;
}

/** The model in one line. */
export function modelLine(model) {
  const numbers = { count: formatCount(model.num_parameters), active: formatCount(model.num_active_parameters) };
  const parts = model.num_experts
    ? [
        tr("{count} experts, {active} per token", { count: model.num_experts, active: model.top_k }),
        tr("{count} parameters, {active} active", numbers),
      ]
    : [tr("{count} parameters", numbers)];
  return [...parts, model.weight_format].join(" · ");
}

/** The description of the model for new users. */
export function welcomeText(model) {
  const { name, num_experts: count, top_k: active } = model;
  return count
    ? tr("{name} has {count} experts in every layer, and a router sends each token through {active} of them. It can be wrong, so check what matters.", { name, count, active })
    : tr("{name} is a dense model with {count} parameters. It can be wrong, so check what matters.", { name, count: formatCount(model.num_parameters) });
}

/** Draw the experts of a layer as bars, as many filled as one token uses. Which ones differs for every token. */
export function drawExperts(strip, model) {
  const count = model.num_experts > MAX_STRIP ? 0 : model.num_experts;
  strip.hidden = !count;
  strip.replaceChildren(
    ...Array.from({ length: count }, (_, i) => {
      const bar = document.createElement("span");
      const isUsed = Math.floor(((i + 1) * model.top_k) / count) > Math.floor((i * model.top_k) / count);
      bar.classList.toggle("used", isUsed);
      return bar;
    }),
  );
}

/** The model's facts, terms and details. */
export function modelFacts(model) {
  return [
    [tr("Name"), model.name],
    [tr("Architecture"), model.model_type],
    [tr("Layers"), model.num_layers],
    ...(model.num_experts ? [[tr("Experts"), tr("{count} in a layer, {active} per token", { count: model.num_experts, active: model.top_k })]] : []),
    ...(model.lossy_top_k ? [[tr("Experts chosen by"), tr("a predictor, {count} per token of an input: lossy", { count: model.lossy_top_k })]] : []),
    [tr("Parameters"), formatCount(model.num_parameters)],
    [tr("Active per token"), formatCount(model.num_active_parameters)],
    [tr("Runs in"), tr("{format} on {device}", { format: model.weight_format, device: model.device })],
    ...(model.speculators.length ? [[tr("Drafts tokens with"), model.speculators.join(", ")]] : []),
    [tr("Context"), tr("{count} tokens", { count: formatNumber(model.max_model_len) })],
    [tr("KV cache"), tr("{count} tokens", { count: formatNumber(model.kv_capacity_tokens) })],
  ];
}

/** The share of the KV cache that requests hold. */
export function kvText(stats) {
  return stats?.kv_blocks_total ? formatPercent(stats.kv_blocks_used / stats.kv_blocks_total) : NONE;
}

/** Fill a <dl> with facts: [term, detail]. Only new texts are written, so that marked text stays marked. */
export function listFacts(list, facts) {
  if (list.children.length !== facts.length) list.replaceChildren(...facts.map(emptyRow));
  facts.forEach((texts, i) => texts.forEach((text, j) => setText(list.children[i].children[j], String(text))));
}

function emptyRow() {
  const row = document.createElement("div");
  row.append(document.createElement("dt"), document.createElement("dd"));
  return row;
}

/** Texts of the live row, by the end of their element's id. `answer` is the last one, or undefined. */
export function liveNumbers(stats, answer) {
  const measured = answer?.measured;
  return {
    speed: measured?.tokensPerS ? formatNumber(measured.tokensPerS, 1) : NONE,
    first: measured ? `${formatNumber(measured.firstTokenS, 2)} s` : NONE,
    running: stats ? formatNumber(stats.num_running) : NONE,
    queue: stats ? formatNumber(stats.num_waiting) : NONE,
    kv: kvText(stats),
  };
}

/** One finished answer's numbers, for the line under it. */
export function measuredLine(answer) {
  const parts = [];
  if (answer.state === "stopped") parts.push(tr("Stopped"));
  if (answer.cutOff) parts.push(tr("Cut off at max tokens"));
  if (answer.measured) {
    const { tokens, isExact, totalS, tokensPerS } = answer.measured;
    const numbers = { count: formatNumber(tokens), seconds: formatNumber(totalS, 1) };
    if (isExact) parts.push(tr(tokens === 1 ? "{count} token in {seconds} s" : "{count} tokens in {seconds} s", numbers));
    else parts.push(tr(tokens === 1 ? "about {count} token in {seconds} s" : "about {count} tokens in {seconds} s", numbers));
    if (tokensPerS) parts.push(tr("{rate} tokens/s while writing", { rate: formatNumber(tokensPerS, 1) }));
  }
  return parts.join(" · ");
}

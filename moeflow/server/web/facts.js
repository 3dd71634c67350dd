// Writes what the server and the last answer tell in numbers: the model's facts and the live row.

export const NONE = "–";
const MAX_STRIP = 64; // more bars than this say nothing to the eye

/** 134515008 -> "135M", 46702792704 -> "46.7B" */
export function formatCount(count) {
  const units = [[1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const [factor, unit] = units.find(([least]) => count >= least) ?? [1, ""];
  return `${(count / factor).toLocaleString("en", { maximumSignificantDigits: 3 })}${unit}`;
}

/** The model in one line. */
export function modelLine(model) {
  const parameters = `${formatCount(model.num_parameters)} parameters`;
  const parts = model.num_experts
    ? [
        `${model.num_experts} experts, ${model.top_k} per token`,
        `${parameters}, ${formatCount(model.num_active_parameters)} active`,
      ]
    : [parameters];
  return [...parts, model.weight_format].join(" · ");
}

/** The description of the model for new users. */
export function welcomeText(model) {
  const kind = model.num_experts
    ? `${model.name} has ${model.num_experts} experts in every layer, and a router sends each token through ${model.top_k} of them.`
    : `${model.name} is a dense model with ${formatCount(model.num_parameters)} parameters.`;
  return `${kind} It can be wrong, so check what matters.`;
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
    ["Name", model.name],
    ["Architecture", model.model_type],
    ["Layers", model.num_layers],
    ...(model.num_experts ? [["Experts", `${model.num_experts} in a layer, ${model.top_k} per token`]] : []),
    ...(model.lossy_top_k ? [["Experts chosen by", `a predictor, ${model.lossy_top_k} per token of an input: lossy`]] : []),
    ["Parameters", formatCount(model.num_parameters)],
    ["Active per token", formatCount(model.num_active_parameters)],
    ["Runs in", `${model.weight_format} on ${model.device}`],
    ...(model.speculators.length ? [["Drafts tokens with", model.speculators.join(", ")]] : []),
    ["Context", `${model.max_model_len.toLocaleString("en")} tokens`],
    ["KV cache", `${model.kv_capacity_tokens.toLocaleString("en")} tokens`],
  ];
}

/** The share of the KV cache that requests hold. */
export function kvText(stats) {
  return stats?.kv_blocks_total ? `${Math.round((100 * stats.kv_blocks_used) / stats.kv_blocks_total)}%` : NONE;
}

/** Fill a <dl> with facts. */
export function listFacts(list, facts) {
  list.replaceChildren(
    ...facts.map(([term, detail]) => {
      const row = document.createElement("div");
      row.append(cell("dt", term), cell("dd", detail));
      return row;
    }),
  );
}

function cell(tag, content) {
  const element = document.createElement(tag);
  element.textContent = content;
  return element;
}

/** Texts of the live row, by the end of their element's id. `answer` is the last one, or undefined. */
export function liveNumbers(stats, answer) {
  const measured = answer?.measured;
  return {
    speed: measured?.tokensPerS ? measured.tokensPerS.toFixed(1) : NONE,
    first: measured ? `${measured.firstTokenS.toFixed(2)} s` : NONE,
    running: stats ? String(stats.num_running) : NONE,
    queue: stats ? String(stats.num_waiting) : NONE,
    kv: kvText(stats),
  };
}

/** One finished answer's numbers, for the line under it. */
export function measuredLine(answer) {
  const parts = [];
  if (answer.state === "stopped") parts.push("Stopped");
  if (answer.cutOff) parts.push("Cut off at max tokens");
  if (answer.measured) {
    const { tokens, isExact, totalS, tokensPerS } = answer.measured;
    parts.push(`${isExact ? "" : "about "}${tokens} ${tokens === 1 ? "token" : "tokens"} in ${totalS.toFixed(1)} s`);
    if (tokensPerS) parts.push(`${tokensPerS.toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}

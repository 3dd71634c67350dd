// Gets one answer, or what follows its beginning: feeds it from the stream and measures it on the way.
// Speed is the reader's: first token counts from sending, tokens per second from the first token on.

import { streamCompletion } from "../api.js";
import { addTokens } from "./token_record.js";

/** Fill `answer` from the stream of a chat request, calling `onChange` after every chunk. Throws what the stream throws. */
export async function fillAnswer(answer, body, { onChange, ...options }) {
  const stopwatch = new Stopwatch();
  const before = answer.measured; // of its beginning
  const isPart = Boolean(answer.content) && !answer.tokens;
  if (answer.tokens && !body.logprobs) answer.tokens.isPart = true;
  const onBegin = (id) => (answer.requestId = id);
  for await (const chunk of streamCompletion(body, { ...options, onBegin })) {
    const choice = chunk.choices?.[0];
    if (choice) take(answer, choice, { stopwatch, isPart });
    if (chunk.usage) answer.usage = chunk.usage;
    answer.measured = sum(before, stopwatch.read(chunk.usage?.completion_tokens));
    onChange();
  }
}

function take(answer, { delta, logprobs, token_trees: trees, finish_reason: reason }, { stopwatch, isPart }) {
  if (delta?.content || delta?.reasoning_content || delta?.tool_calls) stopwatch.count();
  if (delta?.reasoning_content) {
    answer.reasoning += delta.reasoning_content;
    answer.reasoningS = stopwatch.elapsedS();
  }
  if (delta?.content) answer.content += delta.content;
  for (const call of delta?.tool_calls ?? []) {
    const known = (answer.toolCalls[call.index ?? 0] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  if (logprobs?.content) answer.tokens = addTokens(answer.tokens, logprobs.content, { isPart });
  if (trees) answer.passes.push(...trees);
  if (reason === "length") answer.cutOff = true;
}

/** The measurements of two parts of an answer, added. The time to the first token is that of the second part. */
function sum(before, now) {
  if (!before || !now) return before ?? now;
  const tokens = before.tokens + now.tokens;
  const isExact = before.isExact && now.isExact;
  return { ...now, isExact, tokens, totalS: before.totalS + now.totalS, tokensPerS: meanRate([before, now]) };
}

/** The tokens/s of parts while they were written; null where no part has a rate. */
function meanRate(parts) {
  const rated = parts.filter(({ tokensPerS }) => tokensPerS);
  const tokens = rated.reduce((count, it) => count + it.tokens, 0);
  const writtenS = rated.reduce((durationS, it) => durationS + it.tokens / it.tokensPerS, 0);
  return tokens ? tokens / writtenS : null;
}

class Stopwatch {
  constructor() {
    this.start = performance.now();
    this.first = null;
    this.latest = null;
    this.chunks = 0;
  }

  count() {
    this.latest = performance.now();
    this.first ??= this.latest;
    this.chunks += 1;
  }

  /** From the first token on. */
  elapsedS() {
    return (this.latest - this.first) / 1000;
  }

  /** The current state. Until the server tells the usage, a chunk counts as a token. */
  read(exactTokens = null) {
    if (this.first === null) return null;
    const tokens = exactTokens ?? this.chunks;
    const streamS = this.elapsedS();
    return {
      tokens,
      isExact: exactTokens !== null,
      firstTokenS: (this.first - this.start) / 1000,
      totalS: (this.latest - this.start) / 1000,
      tokensPerS: tokens > 1 && streamS > 0 ? (tokens - 1) / streamS : null,
    };
  }
}

// Gets one answer: feeds a turn from the stream and measures it on the way.
// Speed is the reader's: first token counts from sending, tokens per second from the first token on.

import { streamChat } from "./api.js";

/** Fill `turn` from the stream, calling `onChange` after every chunk. Throws what the stream throws. */
export async function fillAnswer(turn, body, { onChange, ...options }) {
  const stopwatch = new Stopwatch();
  for await (const chunk of streamChat(body, options)) {
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      turn.answer += choice.delta.content;
      stopwatch.count();
    }
    if (choice?.token_trees) turn.passes.push(...choice.token_trees);
    if (choice?.finish_reason === "length") turn.cutOff = true;
    turn.measured = stopwatch.read(chunk.usage?.completion_tokens);
    onChange();
  }
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

  /** What is known so far. Until the server tells the usage, a chunk counts as a token. */
  read(exactTokens = null) {
    if (this.first === null) return null;
    const tokens = exactTokens ?? this.chunks;
    const streamS = (this.latest - this.first) / 1000;
    return {
      tokens,
      isExact: exactTokens !== null,
      firstTokenS: (this.first - this.start) / 1000,
      totalS: (this.latest - this.start) / 1000,
      tokensPerS: tokens > 1 && streamS > 0 ? (tokens - 1) / streamS : null,
    };
  }
}

// Writes on behind the beginning of an answer. The chat endpoint has no such request: the tokens of the conversation and
// those of the beginning become the prompt of a plain completion.

import { askJson } from "../api.js";

/** Whether an answer ended before its end, so that more can follow. The request holds no thoughts. */
export function canContinue({ state, content, reasoning, toolCalls, cutOff }) {
  return Boolean(content) && !reasoning && !toolCalls.length && (cutOff || state === "stopped" || state === "failed");
}

/** The body of a completion request that has the model write on behind `content`, the beginning of the answer to the
 *  chat request `chat`. Throws what the server's tokenizer throws. */
export async function continuationBody({ messages, response_format, ...fields }, content, options) {
  const tokenize = async (what) => (await askJson("tokenize", { ...options, body: { model: fields.model, ...what } })).tokens;
  const asked = await tokenize({ messages });
  const begun = await tokenize({ prompt: content, add_special_tokens: false });
  return { ...fields, prompt: [...asked, ...begun] };
}

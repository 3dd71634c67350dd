// Makes a conversation fit the model's context: omits turns from its beginning until an answer fits.

import { askJson } from "../api.js";

const RESERVED_SHARE = 0.25; // of the context, for the answer, unless the answer may be shorter
const PER_MESSAGE = 32; // tokens that a chat template may put around a message, amply

/** Return `messages` without the oldest turns that do not fit, and their number.
 *  `tokenLimit`: of the context; `maxTokens`: of the answer, or undefined; `fields`: others of the request. Throws what the server's tokenizer throws. */
export async function fitContext(messages, { tokenLimit, maxTokens, ...options }) {
  const room = tokenLimit - answerRoom(tokenLimit, maxTokens);
  if (mostTokens(messages) <= room) return { messages, numLeftOut: 0 };
  const numTurns = messages.filter((message) => message.role === "user").length;
  const fits = async (numLeftOut) => (await countTokens(without(messages, numLeftOut), options)) <= room;
  let [least, most] = [0, numTurns - 1]; // the last turn is sent in any case; the server says if it is too long
  while (least < most) {
    const middle = Math.floor((least + most) / 2);
    if (await fits(middle)) most = middle;
    else least = middle + 1;
  }
  return { messages: without(messages, least), numLeftOut: least };
}

/** How many tokens of the context are kept free for an answer of at most `maxTokens`. */
export function answerRoom(tokenLimit, maxTokens = Infinity) {
  return Math.min(maxTokens, Math.floor(tokenLimit * RESERVED_SHARE));
}

function without(messages, numTurns) {
  const numSystem = messages[0].role === "system" ? 1 : 0;
  return [...messages.slice(0, numSystem), ...messages.slice(numSystem + 2 * numTurns)];
}

/** More tokens than there can be: each has at least one byte. It saves asking the server while a conversation is short. */
function mostTokens(messages) {
  const encoder = new TextEncoder();
  return messages.reduce((sum, { content }) => sum + encoder.encode(content).length + PER_MESSAGE, 0);
}

/** The number of tokens of messages as the model sees them. `fields`: others of the request. */
export async function countTokens(messages, { fields, ...options }) {
  const { count } = await askJson("tokenize", { ...options, body: { ...fields, messages } });
  return count;
}

// Has the model continue an answer that ended early: the request's last message is the answer so far.

/** Whether an answer ended before its end, so that more can follow. */
export function canContinue({ state, content, toolCalls, cutOff }) {
  return Boolean(content) && !toolCalls.length && (cutOff || state === "stopped" || state === "failed");
}

/** The message that the model continues, or null: `answer` has no text yet. */
export function begunMessage({ content, reasoning }) {
  return content ? { role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) } : null;
}

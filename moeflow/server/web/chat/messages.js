// What a request sends of a conversation: the system prompt, the turns that have an answer, and the prompt to answer.
// Attached files stand in the prompt that they came with, each fenced by more backticks than it has in a row.

/** Messages that ask for an answer to `prompt`, the last of the turns. */
export function requestMessages(turns, prompt, systemPrompt) {
  const messages = systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
  for (const turn of turns) {
    if (turn.prompt === prompt) break;
    if (!turn.answer?.content) continue;
    messages.push({ role: "user", content: promptText(turn.prompt) }, { role: "assistant", content: turn.answer.content });
  }
  return [...messages, { role: "user", content: promptText(prompt) }];
}

export function promptText({ content, files = [] }) {
  return [...files.map(fileText), content].filter(Boolean).join("\n\n");
}

function fileText({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

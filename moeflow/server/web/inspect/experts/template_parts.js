// Which tokens of a prompt the chat template has added around the messages.

/** For each token text of a prompt whether it holds nothing of the messages' texts, which follow each other in it. */
export function templateParts(texts, messages) {
  const whole = texts.join("");
  const spans = [];
  let from = 0;
  for (const message of messages.map((it) => it.trim()).filter(Boolean)) {
    const start = whole.indexOf(message, from);
    if (start < 0) continue; // the template has changed it, or the context was too short for it
    spans.push([start, start + message.length]);
    from = start + message.length;
  }
  let at = 0;
  return texts.map((text) => {
    const [first, last] = [at, (at += text.length)];
    return !spans.some(([start, end]) => first < end && last > start);
  });
}

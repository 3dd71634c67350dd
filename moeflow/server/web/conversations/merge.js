// Two states of one conversation made one: tabs write the same conversation, and nothing that either has is lost.
// Messages are only ever added, and answers only grow, so of two copies of a message the further one is the later one.

import { promptText } from "../chat/messages.js";

const STATES = ["running", "stopped", "refused", "failed", "done"]; // a later one says more about how an answer ended

/** All messages of both, parents before children. Ours stay the same objects, brought up to date; one that is being
 *  written here is nobody else's to change. */
export function mergeMessages(ours, theirs) {
  const rest = new Map(ours.map((message) => [message.id, message]));
  const merged = theirs.map((message) => {
    const own = rest.get(message.id);
    rest.delete(message.id);
    if (!own) return message;
    return own.state !== "running" && isFurther(message, own) ? Object.assign(own, message) : own;
  });
  return withoutVain([...merged, ...rest.values()]);
}

/** Whether each path of `theirs`, from a first prompt on, is also a path of ours. Texts are compared, not ids. */
export function containsPaths(ours, theirs) {
  const same = new Map([["", new Set([""])]]); // by the id of one of theirs, the ids of ours with the same path
  for (const message of theirs) {
    const parents = same.get(message.parent) ?? new Set();
    const found = ours.filter((own) => parents.has(own.parent) && own.role === message.role && promptText(own) === promptText(message));
    if (!found.length) return false;
    same.set(message.id, new Set(found.map((own) => own.id)));
  }
  return true;
}

/** Messages without the answers that ended before their first word, where another version came later and the
 *  conversation did not go on below them. */
export function withoutVain(messages) {
  const lastChildren = new Map(messages.map(({ parent, id }) => [parent, id]));
  const isInVain = (message) =>
    message.role === "assistant" &&
    !message.asked?.isOwn && // one of answers to compare
    length(message) === 0 &&
    message.state !== "running" &&
    !lastChildren.has(message.id) &&
    lastChildren.get(message.parent) !== message.id;
  return messages.filter((message) => !isInVain(message));
}

function isFurther(one, other) {
  if (one.role !== "assistant") return false; // a prompt never changes
  const more = length(one) - length(other);
  return more > 0 || (more === 0 && STATES.indexOf(one.state) > STATES.indexOf(other.state));
}

/** How much came of an answer, in characters. */
function length({ content, reasoning, toolCalls }) {
  return toolCalls.reduce((sum, call) => sum + call.name.length + call.arguments.length, content.length + reasoning.length);
}

// Shows how full the context is: a bar of parts, their numbers, and a warning before turns are left out.

import { setText } from "../set_text.js";
import { language, tr } from "../translate.js";

const PARTS = ["system", "turns", "message", "answer"];
const NEARLY_FULL = 0.85; // of the room that an answer leaves

export class MeterView {
  /** `element` has the bar and the numbers; `warning` is a paragraph; `send` is the button that sends the message. */
  constructor(element, warning, send) {
    Object.assign(this, { element, warning, send });
    this.total = element.querySelector(".total");
    this.segments = new Map(PARTS.map((name) => [name, element.querySelector(`.meter-bar .${name}`)]));
    this.cells = new Map(PARTS.map((name) => [name, element.querySelector(`dl .${name}`)]));
  }

  /** Show tokens by part, see `ContextMeter.parts`; null hides them. `answer`: those of a running answer, or null. */
  show(parts, answer) {
    this.element.classList.toggle("is-unknown", !parts); // its room stays, so that nothing moves
    setText(this.warning, parts && answer === null ? warningOf(parts) : "");
    if (!parts) return;
    const tokens = { ...parts, answer: answer ?? 0 };
    for (const name of PARTS) {
      this.segments.get(name).style.setProperty("flex-basis", `${(100 * tokens[name]) / parts.limit}%`);
      setText(this.cells.get(name).querySelector("dd"), written(tokens[name]));
    }
    for (const name of ["turns", "message"]) this.cells.get(name).hidden = !tokens[name];
    this.cells.get("answer").hidden = answer === null;
    this.element.classList.toggle("is-full", parts.numLeftOut > 0);
    setText(this.total, tr("{used} of {limit} tokens", { used: written(parts.used + tokens.answer), limit: written(parts.limit) }));
  }

  /** Let the user send the message, unless it is known that the server would refuse it. */
  letSend(parts) {
    this.send.disabled = Boolean(parts) && isTooLong(parts);
  }
}

function isTooLong({ alone, limit }) {
  return alone >= limit;
}

/** What the user should know before the message is sent. */
function warningOf(parts) {
  const { alone, used, room, limit, numLeftOut, hasTurns } = parts;
  if (isTooLong(parts)) return tr("This message alone is too long: {used} of {limit} tokens.", { used: written(alone), limit: written(limit) });
  if (numLeftOut === 1) return tr("The context is full: the model will not see the first question and its answer.");
  if (numLeftOut) return tr("The context is full: the model will not see the first {count} questions and their answers.", { count: numLeftOut });
  if (hasTurns && used > NEARLY_FULL * room) return tr("The context is nearly full: soon the model will not see the first question and its answer.");
  return "";
}

function written(count) {
  return count.toLocaleString(language());
}

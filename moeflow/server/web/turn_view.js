// One turn on the page: the prompt, the answer as far as it is, and what can be done with it.

import { measuredLine } from "./facts.js";
import { renderText } from "./render.js";
import { TokenTreesView } from "./token_trees.js";

export class TurnView {
  /** `onCopy(text, button)` and `onRetry()` are called from its buttons. */
  constructor(turn, { onCopy, onRetry }) {
    this.turn = turn;
    this.onCopy = onCopy;
    const template = document.getElementById("turn-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries(
      ["prompt-text", "answer-text", "waiting", "error", "answer-foot", "copy", "retry", "measured"].map((name) => [
        name,
        this.element.querySelector(`.${name}`),
      ]),
    );
    this.trees = new TokenTreesView(this.element.querySelector(".guesses"), onCopy);
    this.parts["prompt-text"].textContent = turn.prompt;
    this.parts.copy.addEventListener("click", () => onCopy(this.turn.answer, this.parts.copy));
    this.parts.retry.addEventListener("click", onRetry);
    this.update();
  }

  /** Show the turn as it is now. `waitingFor` says what a running turn without text waits for. */
  update(waitingFor = "") {
    const { turn, parts } = this;
    const isRunning = turn.state === "running";
    renderText(parts["answer-text"], turn.answer, { onCopy: this.onCopy });
    this.element.classList.toggle("is-running", isRunning);
    parts.waiting.hidden = !isRunning || Boolean(turn.answer);
    parts.waiting.textContent = waitingFor;
    parts.error.hidden = !turn.error;
    parts.error.textContent = turn.error ?? "";
    parts["answer-foot"].hidden = isRunning;
    parts.copy.hidden = !turn.answer;
    parts.measured.textContent = measuredLine(turn);
    this.trees.update(turn.passes);
  }
}

// One answer on the page, as far as it has come: thoughts, calls, text, problems, numbers and drafts.

import { addStyles } from "../add_styles.js";
import { measuredLine } from "../facts.js";
import { MarkdownView } from "../markdown/view.js";
import { setText } from "../set_text.js";
import { tr } from "../translate.js";
import { canContinue } from "./continuation.js";
import { RarePart } from "./rare_part.js";
import { endsInCircles } from "./repetition.js";
import { ThinkingView } from "./thinking_view.js";

const PARTS = ["answer-text", "waiting", "left-out", "repeats", "error", "answer-foot", "copy", "continue", "retry", "retry-probable", "why", "which-experts", "measured"];

export class AnswerView {
  /** `element` is the `.answer` of the template. `actions`: onCopy(text, button), onRetry(answer), onRetryProbable(answer), onContinue(answer),
   *  onStop(), onWhy(requestId), onExperts(requestId), announce(text). */
  constructor(element, actions) {
    Object.assign(this, { element, actions });
    this.answer = null;
    const part = (name) => element.querySelector(`.${name}`);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, part(name)]));
    this.text = new MarkdownView(this.parts["answer-text"]);
    this.thinking = new ThinkingView(part("thinking"), part("calls"));
    this.probabilities = new RarePart(async () => {
      await addStyles("../probabilities.css", import.meta.url);
      const { ProbabilitiesView } = await import("./probabilities_view.js");
      return new ProbabilitiesView(part("probabilities"), part("show-probabilities"), part("answer-text"));
    });
    this.trees = new RarePart(async () => {
      const { TokenTreesView } = await import("../token_trees.js");
      return new TokenTreesView(part("drafts"), actions.onCopy);
    });
    this.stopRepeating = part("stop-repeating");
    this.listen();
  }

  listen() {
    const { copy, retry, "retry-probable": retryProbable, why, "which-experts": experts } = this.parts;
    copy.addEventListener("click", () => this.actions.onCopy(this.answer.content, copy));
    retry.addEventListener("click", () => this.actions.onRetry(this.answer));
    retryProbable.addEventListener("click", () => this.actions.onRetryProbable(this.answer));
    why.addEventListener("click", () => this.actions.onWhy(this.answer.requestId));
    experts.addEventListener("click", () => this.actions.onExperts(this.answer.requestId));
    this.parts.continue.addEventListener("click", () => this.actions.onContinue(this.answer));
    this.stopRepeating.addEventListener("click", () => this.actions.onStop());
  }

  /** Show an answer as it is now; null shows none. `waitingFor` names the reason why a running answer has no text yet. */
  show(answer, waitingFor) {
    if (answer !== this.answer) this.text.reset();
    this.answer = answer;
    this.element.hidden = !answer;
    if (answer) this.update(waitingFor);
  }

  update(waitingFor) {
    const { parts, answer } = this;
    const isRunning = answer.state === "running";
    this.element.classList.toggle("is-running", isRunning);
    this.text.update(answer.content, { isGrowing: isRunning });
    this.thinking.update(answer);
    parts.waiting.hidden = !isRunning || Boolean(answer.content || answer.reasoning);
    setText(parts.waiting, waitingFor);
    parts["left-out"].hidden = !answer.numLeftOut;
    setText(parts["left-out"], leftOutLine(answer.numLeftOut));
    parts.error.hidden = !answer.error;
    setText(parts.error, answer.error ?? "");
    parts["answer-foot"].hidden = isRunning;
    parts.copy.hidden = !answer.content;
    parts.continue.hidden = !canContinue(answer);
    parts["retry-probable"].hidden = Boolean(answer.tokens) || !answer.content;
    parts.why.hidden = parts["which-experts"].hidden = !answer.requestId;
    this.showCircles(answer);
    setText(parts.measured, isRunning ? "" : measuredLine(answer));
    this.probabilities.update(answer.tokens, Boolean(answer.tokens));
    this.trees.update(answer.passes, answer.passes.length > 0);
  }

  /** Show a notice under an answer that repeats itself without end. */
  showCircles({ state, content, cutOff }) {
    const isRunning = state === "running";
    const wasHidden = this.parts.repeats.hidden;
    this.parts.repeats.hidden = !((isRunning || cutOff || state === "stopped") && endsInCircles(content));
    this.stopRepeating.hidden = !isRunning;
    if (isRunning && wasHidden && !this.parts.repeats.hidden) this.actions.announce(tr("The answer repeats itself. Escape stops it."));
  }
}

function leftOutLine(numTurns) {
  return numTurns === 1
    ? tr("The context is full: the model no longer saw the first question and its answer.")
    : tr("The context is full: the model no longer saw the first {count} questions and their answers.", { count: numTurns });
}

// The answers to one prompt side by side: each with its model, its settings and its numbers. The user chooses one, and
// the next message follows it.

import { AnswerView } from "../chat/answer_view.js";
import { describeValues } from "../presets/values.js";
import { setText } from "../set_text.js";
import { tr } from "../translate.js";

export class Comparison {
  /** `actions`: as of `AnswerView`, and onUse(answer), onCompare(isCompared), onRetryWith(). */
  constructor(element, actions) {
    Object.assign(this, { element, actions });
    this.columns = element.querySelector(".attempts");
    this.attempts = []; // of class Attempt, in the order of the columns
    element.querySelector(".one").addEventListener("click", () => actions.onCompare(false));
    element.querySelector(".with").addEventListener("click", () => actions.onRetryWith());
  }

  /** Show these answers; the next message follows `chosen`. Without answers, hide all. */
  show(answers, chosen, waitingFor) {
    this.element.hidden = answers.length === 0;
    const old = new Map(this.attempts.map((attempt) => [attempt.answer, attempt]));
    this.attempts = answers.map((answer) => old.get(answer) ?? new Attempt(answer, this.actions));
    const elements = this.attempts.map(({ element }) => element);
    if (elements.some((element, i) => this.columns.children[i] !== element) || this.columns.children.length !== elements.length) {
      this.columns.replaceChildren(...elements);
    }
    for (const [i, attempt] of this.attempts.entries()) attempt.show(i + 1, answers.length, attempt.answer === chosen, waitingFor(attempt.answer));
  }

  /** Show one of them as it is now. */
  update(answer, waitingFor) {
    this.attempts.find((attempt) => attempt.answer === answer)?.update(waitingFor);
  }
}

class Attempt {
  constructor(answer, actions) {
    this.answer = answer;
    const { content } = document.getElementById("attempt-template");
    this.element = content.firstElementChild.cloneNode(true);
    const part = (selector) => this.element.querySelector(selector);
    [this.title, this.line, this.button, this.chosen] = ["h3", ".asked", ".use-answer button", ".chosen"].map(part);
    const template = document.getElementById("turn-template").content.querySelector(".answer");
    const element = template.cloneNode(true);
    element.querySelector("h2").remove(); // the title of the column stands for it
    this.view = new AnswerView(element, actions);
    part(".use-answer").before(this.view.element);
    this.button.addEventListener("click", () => actions.onUse(answer));
  }

  show(number, count, isChosen, waitingFor) {
    const name = tr("Answer {number} of {count}", { number, count });
    this.element.setAttribute("aria-label", name);
    this.element.classList.toggle("is-chosen", isChosen);
    this.chosen.hidden = !isChosen;
    this.isChosen = isChosen;
    this.number = name;
    this.update(waitingFor);
  }

  update(waitingFor) {
    setText(this.title, this.answer.asked?.model || this.number);
    setText(this.line, askedLine(this.answer.asked));
    this.button.hidden = this.isChosen || this.answer.state === "running";
    this.view.show(this.answer, waitingFor);
  }
}

/** The settings of an answer in one line. */
function askedLine(asked) {
  if (!asked) return tr("Its settings are not known.");
  const parts = [tr("Preset {name}", { name: asked.preset }), ...describeValues(asked.values)];
  return parts.join(" · ");
}

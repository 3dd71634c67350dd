// One turn on the page: a prompt and its answer so far, the versions of both, and their actions.

import { fileSize } from "../files.js";
import { AnswerView } from "./answer_view.js";
import { promptText } from "./messages.js";
import { PromptEditor } from "./prompt_editor.js";
import { VersionsView } from "./versions_view.js";

const PARTS = ["prompt-text", "prompt-foot", "files", "answer", "answer-foot", "copy-prompt", "edit", "comparison", "retry-with", "compare"];

export class TurnView {
  /** `actions`: onCopy(text, button), onRetry(turn), onRetryProbable(turn, answer), onRetryWith(turn), onContinue(turn, answer), onStop(),
   *  onEdit(turn, content), onChoose(message), onCompare(turn, isCompared), onUse(answer), announce(text). */
  constructor(actions) {
    this.actions = actions;
    this.turn = null;
    const template = document.getElementById("turn-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, this.element.querySelector(`.${name}`)]));
    this.answerActions = {
      ...actions,
      onRetry: () => actions.onRetry(this.turn),
      onRetryProbable: (answer) => actions.onRetryProbable(this.turn, answer),
      onRetryWith: () => actions.onRetryWith(this.turn),
      onContinue: (answer) => actions.onContinue(this.turn, answer),
      onCompare: (isCompared) => this.switch(isCompared),
    };
    this.answerView = new AnswerView(this.parts.answer, this.answerActions);
    this.comparison = null; // until answers are compared
    this.isSwitching = false; // the user has pressed a button that will go away with the focus
    this.promptVersions = new VersionsView(this.parts["prompt-foot"].querySelector(".versions"), actions.onChoose);
    this.answerVersions = new VersionsView(this.parts["answer-foot"].querySelector(".versions"), actions.onChoose);
    this.editor = new PromptEditor(this.element, (content) => actions.onEdit(this.turn, content));
    this.listen();
  }

  get answer() {
    return this.turn.answer;
  }

  listen() {
    const { edit, compare, "copy-prompt": copyPrompt, "retry-with": retryWith } = this.parts;
    retryWith.addEventListener("click", () => this.actions.onRetryWith(this.turn));
    compare.addEventListener("click", () => this.switch(true));
    edit.addEventListener("click", () => this.editor.open(this.turn.prompt.content));
    copyPrompt.addEventListener("click", () => this.actions.onCopy(promptText(this.turn.prompt), copyPrompt));
  }

  /** Show the answers side by side, or one of them. */
  switch(isCompared) {
    this.isSwitching = true;
    this.actions.onCompare(this.turn, isCompared);
  }

  /** Show a turn, one of versions. `waitingFor(answer)` gives the reason why a running answer has no text yet.
   *  With the class `Comparison`, all answers are shown, side by side. */
  show(turn, { prompts, answers }, waitingFor, Comparison) {
    if (turn.prompt !== this.turn?.prompt) this.showPrompt(turn.prompt);
    Object.assign(this, { turn, answers, waitingFor });
    const wasCompared = this.isCompared;
    this.isCompared = Boolean(Comparison) && answers.length > 1;
    this.promptVersions.show(prompts, turn.prompt);
    this.answerVersions.show(answers, turn.answer);
    this.parts.compare.hidden = answers.length < 2;
    this.element.classList.toggle("is-compared", this.isCompared);
    if (this.isCompared) this.comparison ??= new Comparison(this.parts.comparison, this.answerActions);
    this.comparison?.show(this.isCompared ? answers : [], turn.answer, waitingFor);
    this.showAnswer();
    if (this.isSwitching && this.isCompared !== wasCompared) this.moveFocus();
  }

  moveFocus() {
    this.isSwitching = false;
    (this.isCompared ? this.parts.comparison.querySelector(".one") : this.parts.compare).focus();
  }

  /** Whether an answer is on the page. */
  shows(answer) {
    return this.isCompared ? this.answers.includes(answer) : this.answer === answer;
  }

  showPrompt({ content, files = [] }) {
    this.editor.close();
    this.parts["prompt-text"].textContent = content;
    this.parts["prompt-text"].hidden = !content;
    this.parts.files.replaceChildren(...files.map(fileElement));
  }

  /** Show one of the answers as it is now. */
  update(answer) {
    if (this.isCompared) this.comparison.update(answer, this.waitingFor(answer));
    this.showAnswer();
  }

  showAnswer() {
    const shown = this.isCompared ? null : this.answer;
    this.answerView.show(shown, shown && this.waitingFor(shown));
    this.element.classList.toggle("is-running", (this.isCompared ? this.answers : [this.answer]).some((it) => it?.state === "running"));
  }
}

function fileElement({ name, text }) {
  const file = document.createElement("details");
  file.className = "file";
  const summary = document.createElement("summary");
  summary.textContent = `${name} · ${fileSize(text)}`;
  const content = document.createElement("pre");
  content.tabIndex = 0; // a keyboard must be able to scroll it
  content.textContent = text;
  file.append(summary, content);
  return file;
}

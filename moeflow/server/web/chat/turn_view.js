// One turn on the page: a prompt and its answer so far, the versions of both, and their actions.

import { fileSize } from "../files.js";
import { AnswerView } from "./answer_view.js";
import { promptText } from "./messages.js";
import { PromptEditor } from "./prompt_editor.js";
import { VersionsView } from "./versions_view.js";

const PARTS = ["prompt-text", "prompt-foot", "files", "answer", "answer-foot", "copy-prompt", "edit"];

export class TurnView {
  /** `actions`: onCopy(text, button), onRetry(turn), onContinue(turn), onStop(), onEdit(turn, content),
   *  onChoose(message), announce(text). */
  constructor(actions) {
    this.actions = actions;
    this.turn = null;
    const template = document.getElementById("turn-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, this.element.querySelector(`.${name}`)]));
    this.answerView = new AnswerView(this.parts.answer, {
      ...actions,
      onRetry: () => actions.onRetry(this.turn),
      onContinue: () => actions.onContinue(this.turn),
    });
    this.promptVersions = new VersionsView(this.parts["prompt-foot"].querySelector(".versions"), actions.onChoose);
    this.answerVersions = new VersionsView(this.parts["answer-foot"].querySelector(".versions"), actions.onChoose);
    this.editor = new PromptEditor(this.element, (content) => actions.onEdit(this.turn, content));
    this.listen();
  }

  get answer() {
    return this.turn.answer;
  }

  listen() {
    const { edit, "copy-prompt": copyPrompt } = this.parts;
    edit.addEventListener("click", () => this.editor.open(this.turn.prompt.content));
    copyPrompt.addEventListener("click", () => this.actions.onCopy(promptText(this.turn.prompt), copyPrompt));
  }

  /** Show a turn, one of versions; `waitingFor` as in `update`. */
  show(turn, { prompts, answers }, waitingFor) {
    if (turn.prompt !== this.turn?.prompt) this.showPrompt(turn.prompt);
    this.turn = turn;
    this.promptVersions.show(prompts, turn.prompt);
    this.answerVersions.show(answers, turn.answer);
    this.update(waitingFor);
  }

  showPrompt({ content, files = [] }) {
    this.editor.close();
    this.parts["prompt-text"].textContent = content;
    this.parts["prompt-text"].hidden = !content;
    this.parts.files.replaceChildren(...files.map(fileElement));
  }

  /** Show the turn as it is now. `waitingFor` names the reason why a running answer has no text yet. */
  update(waitingFor) {
    this.answerView.show(this.answer, waitingFor);
    this.element.classList.toggle("is-running", this.answer?.state === "running");
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

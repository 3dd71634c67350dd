// One turn on the page: a prompt and its answer so far, the versions of both, and their actions.

import { fileSize } from "../files.js";
import { measuredLine } from "../facts.js";
import { MarkdownView } from "../markdown/view.js";
import { setText } from "../set_text.js";
import { TokenTreesView } from "../token_trees.js";
import { canContinue } from "./continuation.js";
import { promptText } from "./messages.js";
import { PromptEditor } from "./prompt_editor.js";
import { endsInCircles } from "./repetition.js";
import { ThinkingView } from "./thinking_view.js";
import { VersionsView } from "./versions_view.js";

const PARTS = ["prompt", "prompt-text", "prompt-foot", "files", "answer", "answer-text", "waiting", "left-out", "repeats", "error", "answer-foot", "copy", "continue", "retry", "edit", "measured"];

export class TurnView {
  /** `actions`: onCopy(text, button), onRetry(turn), onContinue(turn), onStop(), onEdit(turn, content),
   *  onChoose(message), announce(text). */
  constructor(actions) {
    this.actions = actions;
    this.turn = null;
    const template = document.getElementById("turn-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    const part = (name) => this.element.querySelector(`.${name}`);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, part(name)]));
    this.text = new MarkdownView(this.parts["answer-text"]);
    this.thinking = new ThinkingView(part("thinking"), part("calls"));
    this.trees = new TokenTreesView(part("drafts"), actions.onCopy);
    this.promptVersions = new VersionsView(this.parts["prompt-foot"].querySelector(".versions"), actions.onChoose);
    this.answerVersions = new VersionsView(this.parts["answer-foot"].querySelector(".versions"), actions.onChoose);
    this.editor = new PromptEditor(this.element, (content) => actions.onEdit(this.turn, content));
    this.stopRepeating = part("stop-repeating");
    this.listen();
  }

  get answer() {
    return this.turn.answer;
  }

  listen() {
    const { copy, retry, edit } = this.parts;
    copy.addEventListener("click", () => this.actions.onCopy(this.answer.content, copy));
    retry.addEventListener("click", () => this.actions.onRetry(this.turn));
    this.parts.continue.addEventListener("click", () => this.actions.onContinue(this.turn));
    this.stopRepeating.addEventListener("click", () => this.actions.onStop());
    edit.addEventListener("click", () => this.editor.open(this.turn.prompt.content));
    const copyPrompt = this.element.querySelector(".copy-prompt");
    copyPrompt.addEventListener("click", () => this.actions.onCopy(promptText(this.turn.prompt), copyPrompt));
  }

  /** Show a turn, one of versions; `waitingFor` as in `update`. */
  show(turn, { prompts, answers }, waitingFor) {
    if (turn.prompt !== this.turn?.prompt) this.showPrompt(turn.prompt);
    if (turn.answer !== this.turn?.answer) this.text.reset();
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
    const { parts, answer } = this;
    parts.answer.hidden = !answer;
    if (!answer) return;
    const isRunning = answer.state === "running";
    this.text.update(answer.content, { isGrowing: isRunning });
    this.thinking.update(answer);
    this.element.classList.toggle("is-running", isRunning);
    parts.waiting.hidden = !isRunning || Boolean(answer.content || answer.reasoning);
    setText(parts.waiting, waitingFor);
    parts["left-out"].hidden = !answer.numLeftOut;
    setText(parts["left-out"], leftOutLine(answer.numLeftOut));
    parts.error.hidden = !answer.error;
    setText(parts.error, answer.error ?? "");
    parts["answer-foot"].hidden = isRunning;
    parts.copy.hidden = !answer.content;
    parts.continue.hidden = !canContinue(answer);
    this.showCircles(answer);
    setText(parts.measured, isRunning ? "" : measuredLine(answer));
    this.trees.update(answer.passes);
  }

  /** Show a notice under an answer that repeats itself without end. */
  showCircles({ state, content, cutOff }) {
    const isRunning = state === "running";
    const wasHidden = this.parts.repeats.hidden;
    this.parts.repeats.hidden = !((isRunning || cutOff || state === "stopped") && endsInCircles(content));
    this.stopRepeating.hidden = !isRunning;
    if (isRunning && wasHidden && !this.parts.repeats.hidden) this.actions.announce("The answer repeats itself. Escape stops it.");
  }
}

function leftOutLine(numTurns) {
  const turns = numTurns === 1 ? "first question and its answer" : `first ${numTurns} questions and their answers`;
  return `The context is full: the model no longer saw the ${turns}.`;
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

// The folded part before an answer: the model's reasoning and its calls of tools.

import { MarkdownView } from "../markdown/view.js";
import { setText } from "../set_text.js";
import { formatNumber, tr } from "../translate.js";

export class ThinkingView {
  /** `thinking` is a <details>, `calls` the list of calls. */
  constructor(thinking, calls) {
    this.thinking = thinking;
    this.line = thinking.querySelector("summary");
    this.text = new MarkdownView(thinking.querySelector(".thinking-text"));
    this.calls = calls;
    this.numCalls = 0;
    this.answer = null;
    thinking.addEventListener("toggle", () => this.draw());
  }

  update(answer) {
    this.answer = answer;
    this.thinking.hidden = !answer.reasoning;
    setText(this.line, this.isThinking ? tr("Thinking…") : thoughtLine(answer.reasoningS));
    this.draw();
    this.showCalls(answer.toolCalls);
  }

  get isThinking() {
    const { state, content, toolCalls } = this.answer;
    return state === "running" && !content && !toolCalls.length;
  }

  /** Invisible parts are not drawn. */
  draw() {
    if (this.thinking.open && this.answer) this.text.update(this.answer.reasoning, { isGrowing: this.isThinking });
  }

  showCalls(calls) {
    this.calls.hidden = calls.length === 0;
    while (this.calls.children.length > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, i) => {
      const shown = this.calls.children[i] ?? this.calls.appendChild(callElement());
      setText(shown.querySelector(".call-name"), call.name);
      setText(shown.querySelector("pre"), indented(call.arguments));
    });
  }
}

function thoughtLine(seconds) {
  return seconds === null ? tr("Thoughts") : tr("Thought for {seconds} s", { seconds: formatNumber(seconds, seconds < 10 ? 1 : 0) });
}

function callElement() {
  const template = document.getElementById("call-template");
  return template.content.firstElementChild.cloneNode(true);
}

/** Arguments are JSON, once they are complete. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Colours code in a worker: highlight.js finds the classes, and this returns them line by line, without HTML.

import hljs from "../vendor/highlight/highlight.js";

/** Takes what highlight.js finds, in the place of the one that writes HTML. */
class LineEmitter {
  constructor() {
    this.lines = [[]];
    this.scopes = [];
  }

  startScope(scope) {
    this.scopes.push(scope);
  }

  endScope() {
    this.scopes.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  addText(text) {
    const scope = (this.scopes.at(-1) ?? "").split(".")[0];
    this.add(scope, text);
  }

  add(scope, text) {
    text.split("\n").forEach((piece, i, all) => {
      const line = this.lines.at(-1);
      const isWhole = i < all.length - 1;
      if (piece || isWhole) line.push(scope, isWhole ? `${piece}\n` : piece);
      if (isWhole) this.lines.push([]);
    });
  }

  /** Code inside code, such as a script in a page. */
  __addSublanguage(emitter) {
    for (const line of emitter.lines) for (let i = 0; i < line.length; i += 2) this.add(line[i], line[i + 1]);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: LineEmitter });

addEventListener("message", ({ data: { number, code, language } }) => {
  const start = performance.now();
  const lines = hljs.getLanguage(language) ? linesOf(code, language) : null;
  postMessage({ number, lines, tookMs: performance.now() - start });
});

function linesOf(code, language) {
  const { _emitter: emitter, errorRaised } = hljs.highlight(code, { language, ignoreIllegals: true });
  return errorRaised ? null : emitter.lines.filter((line) => line.length).map((line) => JSON.stringify(line));
}

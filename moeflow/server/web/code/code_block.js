// A block of code: its language, a button that copies it, and its lines in colours.
// Colours come from a worker, later than the text. New text is plain and follows the coloured lines.

import { tr } from "../translate.js";
import { highlight } from "./highlighter.js";

const SHARE_OF_TIME = 0.1; // of a processor that may go into colouring again while a block grows
const LONGEST_REST_MS = 500; // all the same

export class CodeBlock {
  constructor({ code, language }) {
    this.language = language;
    this.lines = []; // coloured, as highlighter.js gives them
    this.isBusy = false;
    this.element = document.createElement("figure");
    this.content = document.createElement("code");
    this.plain = document.createTextNode("");
    this.content.append(this.plain);
    const body = document.createElement("pre");
    body.tabIndex = 0; // a keyboard must be able to scroll it
    body.dir = "ltr";
    body.append(this.content);
    this.element.append(this.head(), body);
    this.code = "";
    this.update({ code });
  }

  head() {
    const head = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = this.language || tr("code");
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "link copy-code";
    copy.textContent = tr("Copy");
    copy.setAttribute("aria-label", tr("Copy code"));
    head.append(name, copy);
    return head;
  }

  update({ code }) {
    if (code === this.code) return;
    if (code.startsWith(this.code)) {
      this.plain.appendData(code.slice(this.code.length));
    } else {
      this.showLines([]);
      this.plain.data = code;
    }
    this.code = code;
    this.colour();
  }

  /** Have the code coloured, one request at a time, and rest in between while more and more of it comes. */
  async colour() {
    if (this.isBusy || !this.language || !this.code) return;
    this.isBusy = true;
    const { code } = this;
    const { lines, tookMs } = await highlight(code, this.language);
    if (lines && this.code.startsWith(code)) {
      this.showLines(lines);
      this.plain.data = this.code.slice(code.length);
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(tookMs / SHARE_OF_TIME, LONGEST_REST_MS)));
    this.isBusy = false;
    if (lines && this.code !== code) this.colour();
  }

  showLines(lines) {
    let same = 0;
    while (same < lines.length && lines[same] === this.lines[same]) same += 1;
    for (const gone of [...this.content.childNodes].slice(same, -1)) gone.remove();
    this.plain.before(...lines.slice(same).map(drawLine));
    this.lines = lines;
  }
}

function drawLine(line) {
  const shown = document.createElement("span");
  shown.className = "line"; // a box of its own, so that a new line is no new layout of all
  const pieces = JSON.parse(line);
  for (let i = 0; i < pieces.length; i += 2) {
    const [scope, text] = [pieces[i], pieces[i + 1]];
    const piece = scope ? document.createElement("span") : document.createTextNode(text);
    if (scope) {
      piece.className = `code-${scope}`;
      piece.textContent = text;
    }
    shown.append(piece);
  }
  return shown;
}

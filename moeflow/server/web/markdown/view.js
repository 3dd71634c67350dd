// Shows one text of a model while it grows. Finished blocks are parsed and drawn once. Only the last one, which may
// still change, is parsed again for each piece, so the work for a piece does not grow with the answer.

import { parseBlocks } from "./parser.js";
import { patch } from "./patch.js";

const ONLY_MARKS = /^[ \t]*(?:[-=*+#>`~|:][-=*+#>`~|: \t]*|\d{1,9}[.)]?[ \t]*)?$/;
const LONGEST_MARKS = 200; // characters of a line that may still become anything
const CLOSING = "*_~`$\\";

export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.text = ""; // the last input
    this.isGrowing = true;
    this.offset = 0; // where the blocks begin that may still change
    this.numFinished = 0; // blocks before it
    this.open = []; // nodes of those behind it
    this.env = {}; // of the parser: link definitions so far
    this.element.replaceChildren();
  }

  /** Show `text`; `isGrowing`: more of it will come. */
  update(text, { isGrowing = false } = {}) {
    if (text === this.text && isGrowing === this.isGrowing) return;
    const hasEnded = this.isGrowing && !isGrowing;
    if (!text.startsWith(this.text) || (hasEnded && this.hasDefinitions)) this.reset();
    this.text = text;
    this.isGrowing = isGrowing;
    this.env.isUnfinished = isGrowing;
    const tail = text.slice(this.offset);
    this.showTail(isGrowing ? decided(tail) : tail);
    // A definition may stand behind the links that it is for.
    if (hasEnded && this.hasDefinitions && this.numFinished) this.showAll();
  }

  get hasDefinitions() {
    return Object.keys(this.env.references ?? {}).length > 0;
  }

  showTail(tail) {
    const blocks = parseBlocks(tail, this.env);
    const nodes = blocks.map((block) => block.node);
    patch(this.element, this.open, nodes, this.numFinished);
    this.open = nodes.slice(-1);
    if (blocks.length < 2) return;
    this.numFinished += blocks.length - 1;
    this.offset += lineOffset(tail, blocks.at(-1).line);
  }

  showAll() {
    const { text } = this;
    this.reset();
    Object.assign(this, { text, isGrowing: false });
    this.showTail(text);
  }
}

/** A text without what its next character may make something else of. A last line of nothing but marks may become a
 *  list, a heading, a table or a line across; marks at the end may close what stands before them. Otherwise "Fruit:\n-"
 *  would be a heading for as long as the space behind the dash takes to come. */
function decided(text) {
  const start = text.lastIndexOf("\n") + 1;
  if (text.length - start < LONGEST_MARKS && ONLY_MARKS.test(text.slice(start))) return text.slice(0, start);
  let end = text.length;
  while (end > start && CLOSING.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

/** Where a line begins, by its number. */
function lineOffset(text, line) {
  const ends = /\r\n?|\n/g; // what the parser takes for the end of a line
  for (let i = 0; i < line; i += 1) ends.exec(text);
  return ends.lastIndex;
}

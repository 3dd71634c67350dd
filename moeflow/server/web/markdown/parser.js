// What a model's text is: CommonMark with the tables, strikethrough, links and task lists of GitHub, and formulas.
// HTML in it is text, links lead only to web and mail, pictures are links: a model's text loads nothing.

import MarkdownIt from "../vendor/markdown-it/markdown-it.js";
import { addMath } from "./math_rules.js";
import { toNodes } from "./nodes.js";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "main.py" is a file, not a site in Paraguay
parser.validateLink = (url) => /^(?:https?:|mailto:)/i.test(url);
addMath(parser);

/** Parse a text into its top-level blocks: for each the line that it begins at and its node, see nodes.js.
 *  `env` keeps from one part of a text to the next what is said of the whole: link definitions (`references`) and the
 *  level of headings; `env.isUnfinished`: more text will follow. */
export function parseBlocks(text, env = {}) {
  const tokens = parser.parse(text, env);
  const blocks = [];
  let first = 0;
  for (let i = 0; i < tokens.length; i += 1) {
    const isEnd = tokens[i].level === 0 && tokens[i].nesting <= 0;
    if (!isEnd) continue;
    const [node] = toNodes(tokens.slice(first, i + 1), env);
    blocks.push({ line: tokens[first].map[0], node });
    first = i + 1;
  }
  return blocks;
}

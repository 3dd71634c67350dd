// Makes nodes of the parser's tokens. A node is what one node of the document will be:
//   { text }                          text
//   { tag, attributes, children }     an element, of a name and with attributes that this file chooses
//   { code, language }                a block of code
//   { tex, isDisplay, isPending }     a formula; pending: its end has not come yet

import { tr } from "../translate.js";

const ALIGNMENT = /text-align:(\w+)/;
const TASK = /^\[([ xX])\] /;
const BLOCKS_OF_TEXT = new Set(["p", "h3", "h4", "h5", "h6", "td", "th"]);
const BLOCKS_OF_BLOCKS = new Set(["ul", "ol", "table", "blockquote"]);
const BRIEF = 8; // letters
const WORDY = 24;
const LONG_WORD = /[^\s-]{20}/;
const WIDE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/gu; // as two letters, which break anywhere
const LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Adlam}]/u;

/** `env.topHeading` is the level of the text's first heading: it is below the page's own two. */
export function toNodes(tokens, env) {
  const open = [[]]; // children of the elements that are open, outermost first
  for (const [i, token] of tokens.entries()) {
    if (token.hidden) continue; // the paragraph of a tight list's item
    if (token.nesting === 1) {
      const node = elementOf(token, env);
      if (BLOCKS_OF_BLOCKS.has(node.tag) && isRightToLeft(tokens, i)) node.attributes.dir = "rtl";
      open.at(-1).push(wrapped(node));
      open.push(node.children);
    } else if (token.nesting === -1) {
      open.pop();
      if (token.tag === "td" || token.tag === "th") describeCell(open.at(-1).at(-1));
    } else {
      open.at(-1).push(...leaves(token, env));
    }
    // An item of a list of tasks: behind its beginning, that of its paragraph and the text itself.
    if (token.type === "inline" && tokens[i - 2]?.type === "list_item_open") markTask(open.at(-1)[0]);
  }
  return open[0];
}

function markTask(node) {
  if (node?.text) node.text = node.text.replace(TASK, (_, mark) => (mark === " " ? "☐ " : "☑ "));
}

function leaves(token, env) {
  switch (token.type) {
    case "inline":
      return toNodes(token.children, env);
    case "fence":
      return [{ code: withoutLastBreak(token.content), language: token.info.trim().split(/\s+/)[0] }];
    case "code_block":
      return [{ code: withoutLastBreak(token.content), language: "" }];
    case "code_inline":
      return [element("code", {}, [{ text: token.content }])];
    case "math_block":
      return [{ tex: token.content, isDisplay: true, isPending: token.meta.isPending }];
    case "math_inline":
      return [{ tex: token.content, isDisplay: token.meta.isDisplay, isPending: false }];
    case "image":
      return [pictureLink(token)];
    case "softbreak": // who writes a poem means its lines
    case "hardbreak":
      return [element("br")];
    case "hr":
      return [element("hr")];
    default:
      return [{ text: token.content }];
  }
}

function elementOf(token, env) {
  const tag = token.type === "heading_open" ? headingTag(Number(token.tag[1]), env) : token.tag;
  const attributes = BLOCKS_OF_TEXT.has(tag) ? { dir: "auto" } : {};
  if (token.type === "link_open") Object.assign(attributes, leadingTo(token.attrGet("href")));
  if (token.type === "ordered_list_open" && token.attrGet("start") !== null) attributes.start = String(token.attrGet("start"));
  const alignment = ALIGNMENT.exec(token.attrGet("style") ?? "")?.[1];
  if (alignment) attributes.class = alignment; // the page's policy forbids styles in attributes
  return element(tag, attributes);
}

/** Whether the first letter in a block of blocks is written from right to left. `dir="auto"` would not look into blocks
 *  that have a direction of their own; it decides where markers, columns and the line beside a quotation are. */
function isRightToLeft(tokens, start) {
  for (let i = start + 1; tokens[i].level > tokens[start].level; i += 1) {
    const letter = tokens[i].type === "inline" ? LETTER.exec(tokens[i].content) : null;
    if (letter) return RIGHT_TO_LEFT.test(letter[0]);
  }
  return false;
}

function headingTag(level, env) {
  env.topHeading ??= level;
  return `h${3 + Math.min(3, Math.max(0, level - env.topHeading))}`;
}

/** A wide table scrolls in a box of its own; a keyboard must be able to do that. */
function wrapped(node) {
  return node.tag === "table" ? element("div", { class: "table", role: "group", "aria-label": tr("Table"), tabindex: "0" }, [node]) : node;
}

/** Say in its class how much room a cell wants: where a table is wider than its box, the browser would make all columns
 *  as narrow as their longest word. */
function describeCell(node) {
  const text = textOf(node).replace(WIDE, "x ");
  const names = [];
  if (text.length >= BRIEF) names.push(text.length >= WORDY ? "wordy" : "brief");
  if (LONG_WORD.test(text)) names.push("long-word");
  if (names.length) node.attributes.class = [node.attributes.class, ...names].filter(Boolean).join(" ");
}

function textOf({ text = "", children = [] }) {
  return text + children.map(textOf).join("");
}

function pictureLink(token) {
  return element("a", leadingTo(token.attrGet("src")), [{ text: token.content || token.attrGet("src") }]);
}

function leadingTo(href) {
  return { href, target: "_blank", rel: "noopener noreferrer nofollow" };
}

function element(tag, attributes = {}, children = []) {
  return { tag, attributes, children };
}

function withoutLastBreak(text) {
  return text.endsWith("\n") ? text.slice(0, -1) : text;
}

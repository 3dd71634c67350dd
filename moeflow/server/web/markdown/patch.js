// Makes elements show nodes (see nodes.js) and changes only new ones. A selection, a scroll position and coloured lines
// of code stay while text grows.
// Text becomes text nodes and names of elements come from nodes.js: nothing is ever parsed as HTML.

import { CodeBlock } from "../code/code_block.js";
import { showMath } from "./math.js";

const codeBlocks = new WeakMap(); // of figures

/** Change the children of `parent` from the one at `first` on, which show the nodes `before`, into `after`. */
export function patch(parent, before, after, first = 0) {
  after.forEach((node, i) => {
    const shown = parent.childNodes[first + i];
    if (!shown) parent.append(create(node));
    else if (!isSameKind(before[i], node)) shown.replaceWith(create(node));
    else update(shown, before[i], node);
  });
  while (parent.childNodes.length > first + after.length) parent.lastChild.remove();
}

function create(node) {
  if ("text" in node) return document.createTextNode(node.text);
  if ("code" in node) {
    const block = new CodeBlock(node);
    codeBlocks.set(block.element, block);
    return block.element;
  }
  if ("tex" in node) return showMath(document.createElement(node.isDisplay ? "div" : "span"), node);
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attributes)) element.setAttribute(name, value);
  element.append(...node.children.map(create));
  return element;
}

function update(shown, before, node) {
  if ("text" in node) updateText(shown, before.text, node.text);
  else if ("code" in node) codeBlocks.get(shown).update(node);
  else if ("tex" in node) {
    if (node.tex !== before.tex || node.isPending !== before.isPending) showMath(shown, node);
  } else {
    updateAttributes(shown, before.attributes, node.attributes);
    patch(shown, before.children, node.children);
  }
}

function updateAttributes(shown, before, attributes) {
  for (const name of Object.keys(before)) if (!(name in attributes)) shown.removeAttribute(name);
  for (const [name, value] of Object.entries(attributes)) if (value !== before[name]) shown.setAttribute(name, value);
}

function updateText(shown, before, text) {
  if (text === before) return;
  if (text.startsWith(before)) shown.appendData(text.slice(before.length)); // which keeps a selection in it
  else shown.data = text;
}

function isSameKind(before, node) {
  if (!before) return false;
  if ("text" in node) return "text" in before;
  if ("code" in node) return "code" in before && node.language === before.language;
  if ("tex" in node) return "tex" in before && node.isDisplay === before.isDisplay;
  return node.tag === before.tag;
}

// The drafts of an answer, drawn under it: for each pass the tree of drafted tokens, with the accepted path marked.

import { saveText } from "./save_file.js";
import { percent, toDot, visible } from "./token_tree_dot.js";
import { formatNumber, tr } from "./translate.js";

/** One line with the effect of drafts. */
export function draftsLine(passes) {
  const sum = (count) => passes.reduce((total, pass) => total + count(pass), 0);
  const tokens = sum((pass) => pass.tokens.length);
  const drafted = sum((pass) => pass.num_drafted);
  const rate = formatNumber(passes.length ? tokens / passes.length : 0, 2);
  return tr("{rate} tokens a pass · {right} of {drafted} drafts right", { rate, right: sum((pass) => pass.num_accepted), drafted });
}

/** The <details> under one answer. Draws when it is open, and then only passes that are new. */
export class TokenTreesView {
  /** `element` is the <details>; `onCopy(text, button)` copies. */
  constructor(element, onCopy) {
    this.element = element;
    this.line = element.querySelector(".drafts-line");
    this.legend = element.querySelector(".drafters");
    this.list = element.querySelector(".passes");
    this.show([]);
    element.addEventListener("toggle", () => this.draw());
    const copyButton = element.querySelector(".copy-dot");
    copyButton.addEventListener("click", () => onCopy(this.dot, copyButton));
    element.querySelector(".save-dot").addEventListener("click", () => saveText("token-trees.dot", "text/vnd.graphviz", this.dot));
  }

  get dot() {
    return toDot("answer", this.passes);
  }

  update(passes) {
    if (this.passes !== passes) this.show(passes);
    this.element.hidden = passes.length === 0;
    this.line.textContent = draftsLine(passes);
    this.draw();
  }

  /** Begin anew, with another answer's passes. */
  show(passes) {
    this.passes = passes;
    this.numDrawn = 0;
    this.letters = new Map(); // of speculators: their names may be long
    this.legend.replaceChildren();
    this.list.replaceChildren();
  }

  draw() {
    if (!this.element.open) return;
    for (; this.numDrawn < this.passes.length; this.numDrawn += 1) {
      const pass = this.passes[this.numDrawn];
      const last = this.list.lastElementChild;
      // Passes without drafts share one row: only their tokens are shown.
      if (!pass.num_drafted && last?.classList.contains("plain")) addPlain(last, pass, this.numDrawn + 1);
      else this.list.append(passRow(pass, this.numDrawn + 1, (names) => this.lettersOf(names)));
    }
  }

  lettersOf(names) {
    for (const name of names) {
      if (this.letters.has(name)) continue;
      this.letters.set(name, String.fromCodePoint(65 + this.letters.size));
      this.legend.append(element("li", "", `${this.letters.get(name)}: ${name}`));
    }
    return names.map((name) => this.letters.get(name)).join("");
  }
}

function passRow(pass, number, lettersOf) {
  const row = element("li", pass.num_drafted ? "" : "plain");
  const head = element("span", "pass-number");
  head.append(element("span", "pass-range", String(number)));
  const kept = pass.num_drafted ? tr("{count} of {total}", { count: pass.num_accepted, total: pass.num_drafted }) : "";
  head.append(element("span", "pass-kept", kept));
  const tree = element("div", "tree");
  tree.tabIndex = 0; // a keyboard must be able to scroll it
  tree.setAttribute("role", "group");
  tree.setAttribute("aria-label", kept ? tr("Pass {number}, {kept} drafts right", { number, kept }) : tr("Pass {number}", { number }));
  const own = pass.tokens.slice(pass.drafted.length ? pass.num_accepted : 0);
  tree.append(...branches(pass.drafted, own, lettersOf));
  row.append(head, tree);
  row.dataset.first = number;
  return row;
}

function addPlain(row, pass, number) {
  row.querySelector(".pass-range").textContent = `${row.dataset.first}–${number}`;
  row.querySelector(".tree").append(...pass.tokens.map(ownToken));
}

/** The accepted path first, with the model's own token at its end; rejected drafts below. */
function branches(drafted, own, lettersOf) {
  const below = new Map([[null, []]]);
  drafted.forEach((token, place) => {
    below.set(place, []);
    below.get(token.parent).push(place);
  });
  const grown = (parent, isPath) => {
    const places = below.get(parent).toSorted((a, b) => drafted[b].is_accepted - drafted[a].is_accepted);
    const found = places.map((place) => {
      const branch = element("div", "branch");
      branch.append(draftedToken(drafted[place], lettersOf));
      const children = grown(place, isPath && drafted[place].is_accepted);
      if (children.length) branch.append(withChildren("div", "children", children));
      return branch;
    });
    const goesOn = places.some((place) => drafted[place].is_accepted);
    if (isPath && !goesOn && own.length) found.unshift(withChildren("div", "branch", own.map(ownToken)));
    return found;
  };
  return grown(null, true);
}

function draftedToken(token, lettersOf) {
  const chip = element("span", `token ${token.is_accepted ? "accepted" : "rejected"}`);
  const who = `${lettersOf(token.speculators)} ${percent(token.chance)}`;
  chip.append(element("span", "token-text", visible(token.token)), element("span", "token-from", who));
  const drafted = { speculators: token.speculators.join(", "), chance: percent(token.chance) };
  chip.title = token.is_accepted
    ? tr("Right. Drafted by {speculators}, with a chance of {chance}.", drafted)
    : tr("Not taken. Drafted by {speculators}, with a chance of {chance}.", drafted);
  if (token.is_accepted) chip.append(element("span", "unseen", ` (${tr("right")})`));
  return chip;
}

function ownToken(token) {
  const chip = element("span", "token own");
  chip.title = tr("The model’s own choice.");
  chip.append(element("span", "token-text", visible(token.token)));
  return chip;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function withChildren(tag, className, children) {
  const made = element(tag, className);
  made.append(...children);
  return made;
}

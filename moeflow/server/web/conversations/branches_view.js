// The tree of a conversation: which versions of its messages there are, and which of them are shown. Choosing one opens
// its branch. A branch can be deleted, and put back while the view is open.

import { tr } from "../translate.js";
import { branchRows } from "./branches.js";

const MAX_WORDS = 120; // characters

export class BranchesView {
  /** `dialog` shows the tree; `chat` holds the conversation. */
  constructor(dialog, chat) {
    Object.assign(this, { dialog, chat });
    this.tree = dialog.querySelector("[role=tree]");
    this.line = dialog.querySelector(".branches-line");
    this.undo = dialog.querySelector(".undo");
    this.removed = null; // what `Chat.remove` gave last
    this.tree.addEventListener("keydown", (event) => this.press(event));
    this.undo.querySelector("button").addEventListener("click", () => this.restore());
    chat.addEventListener("change", () => dialog.open && this.draw());
  }

  show() {
    this.removed = null;
    this.undo.hidden = true;
    this.dialog.showModal();
    this.draw();
    const open = this.rows.findLast(({ element }) => element.getAttribute("aria-current"));
    this.focus(this.rows.indexOf(open));
  }

  draw() {
    const { conversation } = this.chat;
    const path = new Set(conversation.path().map(({ id }) => id));
    const found = branchRows(conversation.messages);
    const shown = JSON.stringify(found.map(({ message, level }) => [message.id, level, message.content.slice(0, MAX_WORDS), path.has(message.id)]));
    if (shown === this.shown) return; // drawn anew, the tree would lose the focus
    this.shown = shown;
    this.rows = found.map((row) => ({ ...row, element: this.rowElement(row, path.has(row.message.id)) }));
    this.tree.replaceChildren(...this.rows.map(({ element }) => element));
    const count = countEnds(conversation.messages);
    this.line.textContent = tr(count === 1 ? "{count} branch" : "{count} branches", { count });
  }

  rowElement({ message, level, place, count }, isOpen) {
    const { content } = document.getElementById("branch-template");
    const element = content.firstElementChild.cloneNode(true);
    const part = (name) => element.querySelector(`.${name}`);
    const words = wordsOf(message);
    element.setAttribute("aria-level", String(level + 1));
    element.style.setProperty("--level", String(level));
    if (isOpen) element.setAttribute("aria-current", "true");
    element.classList.add(message.role);
    element.classList.toggle("is-fork", count > 1);
    part("branch-who").textContent = message.role === "user" ? tr("You") : tr("Answer");
    part("branch-words").textContent = words;
    part("branch-place").textContent = count > 1 ? tr("{count} of {total}", { count: place, total: count }) : "";
    element.addEventListener("click", () => this.choose(message));
    const remove = part("delete");
    remove.setAttribute("aria-label", tr("Delete the branch “{name}”", { name: words }));
    remove.hidden = !message.parent && count === 1; // that would be the whole conversation
    remove.addEventListener("click", (event) => {
      event.stopPropagation(); // it is no choice
      this.remove(message);
    });
    return element;
  }

  focus(index) {
    const target = this.rows.at(Math.min(Math.max(0, index), this.rows.length - 1));
    for (const { element } of this.rows) element.tabIndex = element === target.element ? 0 : -1;
    target.element.focus();
    target.element.scrollIntoView({ block: "nearest" });
  }

  /** Walk the tree as WAI-ARIA describes. */
  press(event) {
    const at = this.rows.findIndex(({ element }) => element === event.target);
    if (at < 0) return;
    const { message } = this.rows[at];
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, ArrowLeft: this.place(message.parent, at), ArrowRight: this.firstChild(message, at), Home: 0, End: this.rows.length - 1 };
    if (event.key in moves) this.focus(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.choose(message);
    else if (event.key === "Delete") this.remove(message);
    else return;
    event.preventDefault();
  }

  place(id, otherwise) {
    const found = this.rows.findIndex(({ message }) => message.id === id);
    return found < 0 ? otherwise : found;
  }

  firstChild({ id }, otherwise) {
    const found = this.rows.findIndex(({ message }) => message.parent === id);
    return found < 0 ? otherwise : found;
  }

  choose(message) {
    if (!this.chat.choose(message)) return;
    this.dialog.close();
    this.chat.reveal(message);
  }

  remove(message) {
    const at = this.place(message.id, 0);
    const removed = this.chat.remove(message);
    if (!removed) return;
    this.removed = removed;
    this.undo.hidden = false;
    this.undo.querySelector("span").textContent = tr("Deleted “{name}”.", { name: wordsOf(message) });
    this.focus(at);
  }

  restore() {
    this.undo.hidden = true;
    this.chat.restore(this.removed);
    this.focus(this.place(this.removed.messages[0].id, 0));
  }
}

function wordsOf({ content, files = [], reasoning = "", toolCalls = [] }) {
  const text = content.trim() || files[0]?.name || toolCalls[0]?.name || reasoning.trim();
  return text.slice(0, MAX_WORDS).replace(/\s+/g, " ") || tr("(no text)");
}

function countEnds(messages) {
  const parents = new Set(messages.map(({ parent }) => parent));
  return messages.filter(({ id }) => !parents.has(id)).length;
}

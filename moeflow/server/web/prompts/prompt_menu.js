// The list of prompts that "/" opens at the message. The focus stays in the box: arrow keys choose, Enter or Tab inserts,
// Escape closes. `aria-activedescendant` names the active option for screen readers.

import { tr } from "../translate.js";

const TRIGGER = /(?:^|\s)(\/[^\s/]*)$/; // before the caret
const MANAGE = { id: "manage" };

export class PromptMenu {
  /** `box` is the message's, `menu` a listbox. `actions`: onInsert(prompt, start, end), with the range of the box that it
   *  replaces, onManage(), and announce(text). */
  constructor(box, menu, prompts, actions) {
    Object.assign(this, { box, menu, prompts, actions });
    this.options = []; // prompts, and MANAGE
    this.active = -1;
    this.closedAt = null; // the text before the caret at which the user has closed the list
    box.setAttribute("aria-controls", menu.id);
    box.setAttribute("aria-autocomplete", "list");
    box.addEventListener("blur", () => this.close());
    box.form.addEventListener("keydown", (event) => this.press(event), { capture: true }); // before the box sends
    menu.addEventListener("mousedown", (event) => event.preventDefault()); // the focus stays
    menu.addEventListener("click", ({ target }) => {
      const index = [...menu.children].indexOf(target.closest("[role=option]"));
      if (index >= 0) this.take(index);
    });
  }

  get isOpen() {
    return !this.menu.hidden;
  }

  /** The part of the message that asks for a prompt: "/" and the beginning of a name; null where there is none. */
  get wanted() {
    const before = this.box.value.slice(0, this.box.selectionStart);
    return before === this.closedAt ? null : (TRIGGER.exec(before)?.[1] ?? null);
  }

  /** The message is another: open or close. */
  update() {
    const { wanted } = this;
    if (wanted === null) {
      this.close();
      return;
    }
    const query = wanted.slice(1).toLocaleLowerCase();
    const found = this.prompts.all.filter(({ name }) => name.toLocaleLowerCase().includes(query));
    if (!found.length && query) this.close(); // "/" begins something else
    else this.open(found);
  }

  open(found) {
    const wasOpen = this.isOpen;
    this.options = [...found, MANAGE];
    this.menu.replaceChildren(...this.options.map(optionElement));
    this.menu.hidden = false;
    this.activate(found.length ? 0 : -1); // without prompts, Enter sends
    if (!wasOpen) this.actions.announce(tr("Prompts: {count}. Arrow keys choose, Enter inserts.", { count: found.length }));
  }

  close() {
    this.menu.hidden = true;
    this.box.removeAttribute("aria-activedescendant");
  }

  activate(index) {
    this.active = index;
    [...this.menu.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === index)));
    const option = this.menu.children[index];
    if (!option) return;
    this.box.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  }

  press(event) {
    if (!this.isOpen || event.target !== this.box || event.isComposing) return;
    const count = this.options.length;
    const actions = {
      ArrowDown: () => this.activate((this.active + 1) % count),
      ArrowUp: () => this.activate((Math.max(this.active, 0) + count - 1) % count),
      Enter: () => this.take(this.active),
      Tab: () => this.take(this.active),
      Escape: () => {
        this.closedAt = this.box.value.slice(0, this.box.selectionStart);
        this.close();
      },
    };
    const isTaking = event.key === "Enter" || event.key === "Tab";
    if (!(event.key in actions) || event.shiftKey || (isTaking && this.active < 0)) return;
    event.preventDefault();
    event.stopPropagation(); // Enter would send, Escape stop an answer
    actions[event.key]();
  }

  take(index) {
    const option = this.options[index];
    const end = this.box.selectionStart;
    const start = end - (this.wanted?.length ?? 0);
    this.close();
    if (option === MANAGE) this.actions.onManage();
    else this.actions.onInsert(option, start, end);
  }
}

function optionElement(option) {
  const element = document.createElement("li");
  element.id = `prompt-option-${option.id}`;
  element.setAttribute("role", "option");
  const name = element.appendChild(document.createElement("span"));
  name.textContent = option === MANAGE ? tr("Manage prompts…") : option.name;
  if (option === MANAGE) return element;
  const text = element.appendChild(document.createElement("span"));
  text.className = "muted";
  text.textContent = option.text;
  return element;
}

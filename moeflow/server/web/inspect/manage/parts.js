// Parts that the views of jobs, models, machines and the log share.

import { explain } from "../../chat/explain.js";
import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";

/** Have the page use the style of these views, once. */
export function useStyle() {
  const href = new URL("manage.css", import.meta.url).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === href) || document.querySelector(`link[href="${href}"]`)) return;
  document.head.append(make("link", { rel: "stylesheet", href }));
}

/** A section with a heading. */
export function section(title, ...children) {
  return make("section", { className: "manage-section" }, make("h3", { textContent: title }), ...children);
}

/** A button of a view. */
export function action(text, onClick, className = "link") {
  const button = make("button", { type: "button", className, textContent: text });
  button.addEventListener("click", onClick);
  return button;
}

/** A bar of parts of a whole, each with the name of its class. A screen reader gets `label` and the text. */
export class Bar {
  constructor(label, ...names) {
    this.parts = names.map((name) => make("span", { className: `bar-part ${name}` }));
    this.element = make("div", { className: "bar-whole", role: "progressbar", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100" });
    this.element.append(...this.parts);
  }

  /** Show shares of 1, in the order of the names. */
  show(text, ...shares) {
    const total = Math.min(shares.reduce((sum, share) => sum + share, 0), 1);
    this.parts.forEach((part, i) => part.style.setProperty("width", `${100 * Math.min(shares[i], 1)}%`));
    this.element.setAttribute("aria-valuenow", String(Math.round(100 * total)));
    this.element.setAttribute("aria-valuetext", text);
  }
}

/** One line for the outcome of what the user does. */
export class Outcome {
  constructor() {
    this.element = make("p", { className: "manage-outcome", role: "status" });
  }

  tell(text, { isWrong = false } = {}) {
    setText(this.element, text);
    this.element.classList.toggle("is-wrong", isWrong);
  }

  /** Do something that asks the server, with its button disabled; return whether it went well. */
  async during(button, work) {
    button.disabled = true;
    this.tell("");
    try {
      await work();
      return true;
    } catch (error) {
      this.tell(explain(error), { isWrong: true });
      return false;
    } finally {
      button.disabled = false;
    }
  }
}

/** Why something cannot be done, in the place of its buttons; hidden without a reason. */
export class Refusal {
  constructor() {
    this.element = make("p", { className: "manage-refusal", hidden: true });
    this.reason = "";
  }

  /** Show a reason. Commands in it are between backticks. */
  show(reason) {
    if (this.reason === reason) return;
    this.reason = reason;
    this.element.hidden = !reason;
    this.element.replaceChildren(...reason.split("`").map((part, i) => (i % 2 ? make("code", { textContent: part }) : part)));
  }
}

/** Rows by their keys: new ones are made, known ones are updated in place, so that focus stays. */
export class Rows {
  /** `create(item)` returns an object with an `element` and `update(item)`; `none` is shown while there are no rows. */
  constructor(create, none) {
    this.create = create;
    this.list = make("ul", { className: "manage-rows" });
    this.none = make("p", { className: "hint", textContent: none });
    this.element = make("div", {}, this.list, this.none);
    this.rows = new Map();
  }

  /** Show these items; `keyOf(item)` tells them apart. */
  show(items, keyOf) {
    const keys = new Set(items.map(keyOf));
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    items.forEach((item, place) => {
      const key = keyOf(item);
      if (!this.rows.has(key)) this.rows.set(key, this.create(item));
      const row = this.rows.get(key);
      row.update(item);
      if (this.list.children[place] !== row.element) this.list.insertBefore(row.element, this.list.children[place] ?? null);
    });
    this.none.hidden = items.length > 0;
  }
}

/** A row's frame: a name, a state at its side, a line of text, and buttons. */
export function rowFrame(name) {
  const parts = {
    name: make("strong", { className: "row-name", textContent: name }),
    state: make("span", { className: "row-state" }),
    line: make("p", { className: "row-line" }),
    actions: make("div", { className: "row-actions" }),
  };
  const head = make("div", { className: "row-head" }, parts.name, parts.state);
  return { ...parts, element: make("li", { className: "manage-row" }, head, parts.line, parts.actions) };
}

/** The word for a state of a job, a model or an engine. */
export function stateText(state) {
  const words = {
    validating: tr("being checked"),
    in_progress: tr("in progress"),
    finalizing: tr("being finished"),
    completed: tr("completed"),
    failed: tr("failed"),
    expired: tr("expired"),
    cancelling: tr("being cancelled"),
    cancelled: tr("cancelled"),
    unloaded: tr("not loaded"),
    loading: tr("being loaded"),
    ready: tr("ready"),
    restarting: tr("restarting"),
    stalled: tr("does not answer"),
    draining: tr("leaving"),
    gone: tr("gone"),
  };
  return words[state] ?? state;
}

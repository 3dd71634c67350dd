// The panel that shows how the model works: one view at a time, each in a tab. In a wide window it stands beside the
// conversation, else above it. Nothing is asked of the server while it is closed or the page is hidden.

import { explain } from "../chat/explain.js";
import { setText } from "../set_text.js";
import { tr } from "../translate.js";
import { VIEWS } from "./views.js";

const WIDE = "(min-width: 80rem)";
const PARAMETER = "inspect"; // of the address: the open view

export class Inspector {
  /** `panel` is the <dialog>, `opener` the button that opens it; `context` is for the views. */
  constructor(panel, opener, context) {
    Object.assign(this, { panel, opener });
    this.context = { ...context, open: (id, argument) => this.show(id, argument) };
    this.tabs = panel.querySelector("[role=tablist]");
    this.body = panel.querySelector(".inspect-body");
    this.problem = panel.querySelector(".inspect-problem");
    this.wide = matchMedia(WIDE);
    this.shown = new Map(); // of opened views: id -> { element, view, periodMs }
    this.current = null; // the id of the open view
    this.looking = null; // AbortController of the rounds of updates
    this.tabs.replaceChildren(...VIEWS.map((it) => this.tab(it)));
    this.listen();
    if (this.asked) this.show(this.asked);
  }

  /** The view that the address names, or undefined. */
  get asked() {
    const asked = new URLSearchParams(location.search).get(PARAMETER);
    return VIEWS.find(({ id }) => id === asked)?.id;
  }

  listen() {
    this.opener.addEventListener("click", () => this.toggle());
    this.panel.querySelector(".close").addEventListener("click", () => this.panel.close());
    this.panel.addEventListener("close", () => this.ended());
    this.wide.addEventListener("change", () => this.place());
    this.tabs.addEventListener("keydown", (event) => this.step(event));
    this.panel.addEventListener("keydown", (event) => this.escape(event));
    document.addEventListener("visibilitychange", () => this.run());
    addEventListener("popstate", () => this.followHistory());
  }

  tab({ id, title }) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = tr(title);
    button.setAttribute("role", "tab");
    button.id = `inspect-tab-${id}`;
    button.setAttribute("aria-controls", `inspect-${id}`);
    button.addEventListener("click", () => this.show(id));
    return button;
  }

  toggle() {
    if (this.panel.open) this.panel.close();
    else this.show(this.current ?? VIEWS[0].id);
  }

  /** Open a view, and in it what `argument` names. */
  async show(id, argument) {
    if (this.current !== id) this.shown.get(this.current)?.view.hide?.();
    this.current = id;
    if (!this.panel.open) this.place({ opens: true });
    this.address();
    for (const tab of this.tabs.children) {
      const isCurrent = tab.id === `inspect-tab-${id}`;
      tab.setAttribute("aria-selected", String(isCurrent));
      tab.tabIndex = isCurrent ? 0 : -1;
    }
    if (!(await this.load(id)) || this.current !== id) return;
    for (const [name, { element }] of this.shown) element.hidden = name !== id;
    if (argument !== undefined) this.shown.get(id).view.open(argument);
    this.run();
  }

  /** Load a view's module once; return whether it is there. */
  async load(id) {
    if (this.shown.has(id)) return true;
    try {
      const { default: View } = await VIEWS.find((it) => it.id === id).load();
      if (this.shown.has(id)) return true; // it was asked for twice
      const element = document.createElement("section");
      element.id = `inspect-${id}`;
      element.setAttribute("role", "tabpanel");
      element.setAttribute("aria-labelledby", `inspect-tab-${id}`);
      element.tabIndex = 0;
      this.body.append(element);
      this.shown.set(id, { element, view: new View(element, this.context), periodMs: View.periodMs });
      return true;
    } catch {
      setText(this.problem, tr("This view could not be loaded. Reload the page."));
      return false;
    }
  }

  /** Update the open view now and then again and again, until another round begins or the panel closes. */
  async run() {
    this.looking?.abort();
    const shown = this.shown.get(this.current);
    if (!this.panel.open || document.hidden || !shown) return;
    const { signal } = (this.looking = new AbortController());
    while (!signal.aborted) {
      try {
        await shown.view.update(signal);
        if (!signal.aborted) setText(this.problem, "");
      } catch (error) {
        if (!signal.aborted) setText(this.problem, explain(error));
      }
      await new Promise((resolve) => setTimeout(resolve, shown.periodMs));
    }
  }

  /** Stand as the width of the window wants it. The focus stays where it is in the panel, or comes to the tab. */
  place({ opens = this.panel.open } = {}) {
    const held = this.panel.contains(document.activeElement) ? document.activeElement : null;
    if (this.panel.open) {
      this.isMoving = true;
      this.panel.close();
    }
    if (opens && this.wide.matches) this.panel.show();
    else if (opens) this.panel.showModal();
    if (opens) (held ?? document.getElementById(`inspect-tab-${this.current}`)).focus();
    this.sayIfOpen();
  }

  ended() {
    if (this.isMoving) {
      this.isMoving = false;
      return;
    }
    this.looking?.abort();
    this.shown.get(this.current)?.view.hide?.();
    if (document.activeElement === document.body) this.opener.focus(); // it has moved since it was opened
    this.sayIfOpen();
    this.address();
  }

  sayIfOpen() {
    this.opener.setAttribute("aria-expanded", String(this.panel.open));
    document.documentElement.classList.toggle("has-inspector", this.panel.open && this.wide.matches);
  }

  /** Write the open view into the address. Above the conversation it has an entry of the history, which Back leaves. */
  address() {
    const url = new URL(location.href);
    if (this.panel.open) url.searchParams.set(PARAMETER, this.current);
    else url.searchParams.delete(PARAMETER);
    if (url.href === location.href) return;
    if (!this.panel.open && history.state?.hasInspector) history.back();
    else if (this.panel.matches(":modal") && !this.asked) history.pushState({ hasInspector: true }, "", url);
    else history.replaceState(history.state, "", url);
  }

  /** Escape closes the panel in wide windows, too. First it empties a search. */
  escape({ key, target, defaultPrevented, isComposing }) {
    if (key !== "Escape" || defaultPrevented || isComposing || this.panel.matches(":modal")) return;
    if (target.type !== "search" || !target.value) this.panel.close();
  }

  /** Back and Forward: beside the conversation, the panel stays open. */
  followHistory() {
    if (this.asked && !this.panel.open) this.show(this.asked);
    else if (!this.asked && this.panel.matches(":modal")) this.panel.close();
    else this.address();
  }

  /** Move between tabs by arrow keys, as WAI-ARIA describes. */
  step(event) {
    const tabs = [...this.tabs.children];
    const place = tabs.indexOf(document.activeElement);
    const targets = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 };
    if (!(event.key in targets)) return;
    event.preventDefault();
    const target = tabs.at(targets[event.key] % tabs.length);
    target.focus();
    target.click();
  }
}

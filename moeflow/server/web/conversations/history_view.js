// The list of conversations at the side: search it, open one, rename, export and delete the one that is open, import.
// In a wide window it is a side bar and keeps its state; else it overlays the page, and closes.

import { Stored } from "../storage.js";
import { tr } from "../translate.js";

const WIDE = "(min-width: 64rem)";
const SEARCH_PAUSE_MS = 150;
const UNDO_MS = 10_000;

export class HistoryView {
  /** `panel` is the <dialog>; `actions`: current() gives the open conversation, onRename(id, name), onDelete(id), which returns it,
   *  onBranches(), onRestore(conversation), onExport(kind), onImport(files). */
  constructor(panel, opener, store, actions) {
    Object.assign(this, { panel, opener, store, actions });
    this.list = panel.querySelector(".conversations");
    this.search = panel.querySelector("input[type=search]");
    this.none = panel.querySelector(".none");
    this.undo = panel.querySelector(".undo");
    this.picker = panel.querySelector("input[type=file]");
    this.isOpen = new Stored("localStorage", "history-open");
    this.wide = matchMedia(WIDE);
    this.timer = null;
    this.shown = ""; // what the list shows
    this.currentId = ""; // of the conversation marked in it
    this.numShown = 0; // of calls of `show`, so that an earlier one that comes later is not taken
    this.listen();
    this.place();
  }

  listen() {
    const on = (selector, action) => this.panel.querySelector(selector).addEventListener("click", action);
    this.opener.addEventListener("click", () => this.toggle());
    this.wide.addEventListener("change", () => this.place());
    this.panel.addEventListener("close", () => this.sayIfOpen());
    on(".close", () => this.panel.close());
    on(".import", () => this.picker.click());
    on(".export-all", () => this.actions.onExport("all"));
    on(".undo button", () => this.restore());
    this.picker.addEventListener("change", () => {
      this.actions.onImport([...this.picker.files]);
      this.picker.value = "";
    });
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.show(), SEARCH_PAUSE_MS);
    });
  }

  // ---- where it stands

  /** Stand as the width of the window wants it, and leave the focus where it is. */
  place() {
    const focused = document.activeElement;
    if (this.panel.open) this.panel.close();
    if (this.wide.matches && this.isOpen.read() !== false) this.panel.show();
    focused.focus();
    this.sayIfOpen();
  }

  toggle() {
    if (this.panel.open) this.panel.close();
    else if (this.wide.matches) this.panel.show();
    else this.panel.showModal();
    if (this.wide.matches) this.isOpen.write(this.panel.open);
    this.sayIfOpen();
    if (!this.panel.open) return;
    this.showCurrent();
    this.search.focus();
  }

  sayIfOpen() {
    this.opener.setAttribute("aria-expanded", String(this.panel.open));
    document.documentElement.classList.toggle("has-history", this.panel.open && this.wide.matches);
  }

  /** A conversation was chosen: show it. */
  closeIfAbove() {
    if (this.panel.open && !this.wide.matches) this.panel.close();
  }

  // ---- contents

  async show() {
    this.numShown += 1;
    const number = this.numShown;
    const heads = await this.store.search(this.search.value);
    if (number !== this.numShown || this.list.querySelector("form")) return; // later, or while one is renamed
    const current = this.actions.current();
    const isSearch = Boolean(this.search.value.trim());
    const shown = JSON.stringify([heads, current.id, isSearch]);
    if (shown === this.shown) return; // drawn anew, the list would lose the focus
    this.shown = shown;
    this.list.replaceChildren(...heads.map((head) => this.item(head, head.id === current.id)));
    if (current.id !== this.currentId) this.showCurrent();
    this.currentId = current.id;
    this.none.hidden = heads.length > 0;
    this.none.textContent = isSearch ? tr("Nothing found.") : tr("Conversations are kept here, in this browser alone.");
  }

  /** Scroll the open conversation into the view of a long list. */
  showCurrent() {
    this.list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  item({ id, name }, isCurrent) {
    const template = document.getElementById("conversation-template");
    const item = template.content.firstElementChild.cloneNode(true);
    const link = item.querySelector("a");
    link.href = `#${id}`;
    link.textContent = name;
    link.addEventListener("click", () => this.closeIfAbove());
    if (!isCurrent) {
      item.querySelector(".conversation-actions").remove();
      return item;
    }
    link.setAttribute("aria-current", "page");
    const on = (selector, action) => item.querySelector(selector).addEventListener("click", action);
    on(".rename", () => this.rename(id, link));
    on(".export-markdown", () => this.actions.onExport("markdown"));
    on(".export-html", () => this.actions.onExport("html"));
    on(".export-json", () => this.actions.onExport("json"));
    on(".show-branches", () => this.actions.onBranches());
    on(".delete", () => this.remove(id, name));
    return item;
  }

  rename(id, link) {
    const form = document.createElement("form");
    const box = document.createElement("input");
    box.value = link.textContent;
    box.setAttribute("aria-label", tr("Name of the conversation"));
    form.append(box);
    link.replaceWith(form);
    box.select();
    let isDone = false;
    const finish = async (isKept) => {
      if (isDone) return;
      isDone = true;
      form.remove();
      this.shown = "";
      if (isKept && box.value.trim()) await this.actions.onRename(id, box.value.trim());
      await this.show();
      this.list.querySelector(".rename")?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      finish(true);
    });
    box.addEventListener("blur", () => finish(true));
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault(); // it would close the panel
      finish(false);
    });
  }

  async remove(id, name) {
    this.removed = await this.actions.onDelete(id);
    if (!this.removed) return; // another tab was first
    this.undo.hidden = false;
    this.undo.querySelector("span").textContent = tr("Deleted “{name}”.", { name });
    this.undo.querySelector("button").focus();
    clearTimeout(this.undoTimer);
    this.undoTimer = setTimeout(() => (this.undo.hidden = true), UNDO_MS);
  }

  async restore() {
    this.undo.hidden = true;
    await this.actions.onRestore(this.removed);
    this.list.querySelector("[aria-current]")?.focus();
  }
}

// The colours of the page: the system's, or always light or dark. Kept in this browser; style.css has both.

import { Stored } from "./storage.js";

const SYSTEM = "system";

export class ThemeChoice {
  /** `select` offers the themes by name. */
  constructor(select) {
    this.select = select;
    this.stored = new Stored("localStorage", "theme");
    this.stored.onChange(() => this.show());
    select.addEventListener("change", () => {
      this.stored.write(select.value);
      this.show();
    });
    this.show();
  }

  show() {
    const name = this.stored.read() ?? SYSTEM;
    this.select.value = name;
    document.documentElement.dataset.theme = name;
  }

  reset() {
    this.stored.remove();
    this.show();
  }
}

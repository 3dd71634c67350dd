// Which version of a message is shown, as "2/3", with a way to the one before and the one after.

export class VersionsView {
  constructor(element, onChoose) {
    this.element = element;
    this.onChoose = onChoose;
    [this.back, this.forth] = element.querySelectorAll("button");
    this.place = element.querySelector(".place");
    this.back.addEventListener("click", () => this.step(-1));
    this.forth.addEventListener("click", () => this.step(1));
  }

  show(versions, shown) {
    this.versions = versions;
    this.index = versions.indexOf(shown);
    this.element.hidden = versions.length < 2;
    this.place.textContent = `${this.index + 1}/${versions.length}`;
    this.back.disabled = this.index <= 0;
    this.forth.disabled = this.index >= versions.length - 1;
  }

  step(by) {
    this.onChoose(this.versions[this.index + by]);
    // At the first and the last version one button is off, and would take the focus with it.
    if (!this.element.querySelector(":focus:not(:disabled)")) this.element.querySelector("button:not(:disabled)")?.focus();
  }
}

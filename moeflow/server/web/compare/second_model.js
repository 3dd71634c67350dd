// A second model that is asked too, beside the one that the conversation is held with, where the server has several.

export class SecondModel {
  /** `element` has a button that adds one, the choice, and a button that drops it. `models` is the choice of the first. */
  constructor(element, models) {
    Object.assign(this, { element, models });
    [this.addButton, this.select, this.dropButton] = element.children;
    this.addButton.addEventListener("click", () => this.add());
    this.dropButton.addEventListener("click", () => this.drop());
  }

  /** The name of the second model; null where only one is asked. */
  get name() {
    return this.select.hidden ? null : this.select.value;
  }

  /** Offer all models but the first. */
  show() {
    const others = this.models.names.filter((name) => name !== this.models.name);
    const { value } = this.select;
    this.element.hidden = this.models.names.length < 2;
    this.select.replaceChildren(...others.map((name) => new Option(name)));
    if (others.includes(value)) this.select.value = value;
  }

  /** Add one, or drop it. */
  press() {
    if (this.element.hidden) return;
    if (this.name) this.drop();
    else this.add();
  }

  add() {
    this.toggle(true);
    this.select.focus();
  }

  drop() {
    this.toggle(false);
    this.addButton.focus();
  }

  toggle(isAsked) {
    this.addButton.hidden = isAsked;
    this.select.hidden = this.dropButton.hidden = !isAsked;
  }
}

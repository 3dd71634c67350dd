// Asks for a value of each placeholder of a prompt.

import { tr } from "../translate.js";
import { filled, placeholders } from "./placeholders.js";

export class FillDialog {
  constructor(dialog) {
    this.dialog = dialog;
    this.title = dialog.querySelector("h2");
    this.fields = dialog.querySelector(".fill-fields");
    dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
    dialog.querySelector("form").addEventListener("submit", () => this.onDone(filled(this.text, this.values)));
    dialog.addEventListener("close", () => this.onClosed());
  }

  /** Ask for the values; `onDone(text)` gets the prompt with them. `onClosed()` is called in any case. */
  open({ name, text }, onDone, onClosed) {
    Object.assign(this, { text, onDone, onClosed });
    this.title.textContent = tr("Fill in: {name}", { name });
    this.fields.replaceChildren(...placeholders(text).map(field));
    this.dialog.showModal();
    this.fields.querySelector("textarea").focus();
  }

  get values() {
    return new Map([...this.fields.querySelectorAll("textarea")].map((box) => [box.name, box.value]));
  }
}

function field(name, number) {
  const element = document.createElement("div");
  element.className = "field tall";
  const [label, box] = ["label", "textarea"].map((tag) => element.appendChild(document.createElement(tag)));
  label.textContent = name;
  label.htmlFor = box.id = `fill-${number}`;
  Object.assign(box, { name, rows: 2, required: true, dir: "auto" });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    box.form.requestSubmit();
  });
  return element;
}

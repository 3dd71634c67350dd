// Sampling settings: what the form shows is what requests send. Kept in this browser until reset.
// A value out of range is explained beside its field and not used; closing shows the last good one again.

import { Stored } from "./storage.js";

const DEFAULTS = Object.freeze({
  system: "",
  temperature: 0.7,
  top_p: 0.9,
  top_k: 0, // all tokens
  max_tokens: 4096,
  seed: null, // random
  token_trees: false, // show what was guessed
});

export class Settings {
  constructor(form) {
    this.stored = new Stored("localStorage", "settings");
    this.fields = Object.keys(DEFAULTS).map((name) => form.elements[name]);
    this.hints = new Map(this.fields.map((field) => [field, document.getElementById(`${field.name}-hint`)]));
    this.hintTexts = new Map([...this.hints.values()].map((hint) => [hint, hint.textContent]));
    for (const field of this.fields) field.addEventListener("input", () => this.take(field));
    form.closest("dialog").addEventListener("close", () => this.show());
    this.stored.onChange(() => this.takeKept()); // or this tab would write over what another one has set
    this.takeKept();
  }

  takeKept() {
    const kept = { ...DEFAULTS, ...this.stored.read() };
    // By name, because another version of the page may have kept other settings.
    this.values = Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, kept[name]]));
    this.show();
  }

  get systemPrompt() {
    return this.values.system.trim();
  }

  /** Fields of a chat completion request to a server that guesses tokens, or does not. */
  sampling({ hasGuesses }) {
    const { system, token_trees, ...sampling } = this.values;
    if (hasGuesses && token_trees) sampling.token_trees = true;
    return Object.fromEntries(Object.entries(sampling).filter(([, value]) => value !== null));
  }

  reset() {
    this.values = { ...DEFAULTS };
    this.stored.remove();
    this.show();
  }

  take(field) {
    this.explain(field);
    if (!field.validity.valid) return;
    this.values[field.name] = valueOf(field);
    this.stored.write(this.values);
  }

  show() {
    for (const field of this.fields) {
      if (field.type === "checkbox") field.checked = this.values[field.name];
      else field.value = this.values[field.name] ?? "";
      this.explain(field);
    }
  }

  explain(field) {
    const hint = this.hints.get(field);
    const isValid = field.validity.valid;
    hint.textContent = isValid ? this.hintTexts.get(hint) : field.validationMessage;
    hint.classList.toggle("wrong", !isValid);
    field.setAttribute("aria-invalid", String(!isValid));
  }
}

function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.type !== "number") return field.value;
  return field.value === "" ? null : Number(field.value);
}

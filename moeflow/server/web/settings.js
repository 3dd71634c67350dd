// Sampling settings: requests send the values that the form shows. Kept in this browser until reset. An empty field is
// not sent, and shows the server's default for the model. A value out of range is explained beside its field and not
// used; closing shows the last good one again.

import { Stored } from "./storage.js";

const MAX_STOP_STRINGS = 16; // of the server
const DEFAULTS = Object.freeze({
  system: "",
  temperature: null, // null: the server's default for the model
  top_p: null,
  top_k: null,
  min_p: null,
  repetition_penalty: null,
  max_tokens: 1024,
  seed: null,
  stop_strings: "", // one string a line
  json_schema: "",
  token_trees: false, // show drafts
});
const PROBLEMS = { stop_strings: stopProblem, json_schema: schemaProblem }; // of texts, by their field

export class Settings {
  constructor(form) {
    this.stored = new Stored("localStorage", "settings");
    this.fields = Object.keys(DEFAULTS).map((name) => form.elements[name]);
    this.hints = new Map(this.fields.map((field) => [field, document.getElementById(`${field.name}-hint`)]));
    this.hintTexts = new Map([...this.hints.values()].map((hint) => [hint, hint.textContent]));
    this.defaulted = this.fields.filter((field) => field.placeholder === "default"); // the server has defaults for these
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

  /** The fields of a chat completion request that the user has set. `hasDrafts`: the server drafts tokens. */
  sampling({ hasDrafts }) {
    const { system, token_trees, stop_strings, json_schema, ...numbers } = this.values;
    const sampling = Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null));
    const stops = stopStrings(stop_strings);
    if (stops.length) sampling.stop = stops;
    if (json_schema.trim()) sampling.response_format = schemaFormat(json_schema);
    if (hasDrafts && token_trees) sampling.token_trees = true;
    return sampling;
  }

  /** Show in empty fields the values that the server takes for the model, by name. */
  showDefaults(defaults) {
    for (const field of this.defaulted) field.placeholder = defaults[field.name] ?? "default";
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
    field.setCustomValidity(PROBLEMS[field.name]?.(field.value) ?? "");
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

function stopStrings(text) {
  return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
}

function stopProblem(text) {
  return stopStrings(text).length > MAX_STOP_STRINGS ? `At most ${MAX_STOP_STRINGS} stop strings.` : "";
}

function schemaFormat(text) {
  return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } };
}

function schemaProblem(text) {
  if (!text.trim()) return "";
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? "" : "A schema is a JSON object: { … }.";
  } catch (error) {
    return `This is not JSON: ${error.message}.`;
  }
}

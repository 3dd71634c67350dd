// The fields for settings, and their values. An empty field is not sent, and shows the server's default for the model.
// A value out of range is explained beside its field and not used.

import { tr } from "../translate.js";
import { DEFAULTS, PROBLEMS } from "./values.js";

const DEFAULTED = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]; // the server has defaults for these

export class SettingsFields {
  /** `container` has the fields by name; `onInput(name, value)` gets what the user has set, if it is valid. */
  constructor(container, onInput) {
    this.container = container;
    this.onInput = onInput;
    this.fields = Object.keys(DEFAULTS).map((name) => container.querySelector(`[name="${name}"]`));
    this.hints = new Map(this.fields.map((field) => [field, this.hintOf(field)]));
    this.hintTexts = new Map([...this.hints.values()].map((hint) => [hint, hint.textContent]));
    for (const field of this.fields) field.addEventListener("input", () => this.take(field));
  }

  hintOf(field) {
    return this.container.querySelector(`#${field.getAttribute("aria-describedby")}`);
  }

  show(values) {
    for (const field of this.fields) {
      write(field, values[field.name]);
      this.explain(field);
    }
  }

  /** Show in empty fields the values that the server takes for the model, by name. */
  showDefaults(defaults) {
    const defaulted = this.fields.filter(({ name }) => DEFAULTED.includes(name));
    for (const field of defaulted) field.placeholder = defaults[field.name] ?? tr("default");
  }

  /** Values by name, with the default in the place of each value that its field would refuse. */
  checked(values) {
    return Object.fromEntries(
      this.fields.map((field) => {
        const value = values?.[field.name];
        const wanted = typeof DEFAULTS[field.name];
        const isOfType = value === null ? wanted !== "string" && wanted !== "boolean" : typeof value === typeOf(field);
        return [field.name, isOfType && isValid(field, value) ? value : DEFAULTS[field.name]];
      }),
    );
  }

  take(field) {
    this.explain(field);
    if (field.validity.valid) this.onInput(field.name, valueOf(field));
  }

  explain(field) {
    field.setCustomValidity(PROBLEMS[field.name]?.(field.value) ?? "");
    const hint = this.hints.get(field);
    const isGood = field.validity.valid;
    hint.textContent = isGood ? this.hintTexts.get(hint) : field.validationMessage;
    hint.classList.toggle("wrong", !isGood);
    field.setAttribute("aria-invalid", String(!isGood));
  }
}

/** A second set of fields, with ids of its own, which `prefix` begins. */
export function copyFields(container, prefix) {
  const copy = container.cloneNode(true);
  copy.removeAttribute("id");
  for (const name of ["id", "for", "aria-describedby"]) {
    for (const element of copy.querySelectorAll(`[${name}]`)) element.setAttribute(name, `${prefix}-${element.getAttribute(name)}`);
  }
  return copy;
}

function typeOf({ type }) {
  if (type === "checkbox") return "boolean";
  return type === "number" ? "number" : "string";
}

function isValid(field, value) {
  const probe = field.cloneNode();
  write(probe, value);
  probe.setCustomValidity(PROBLEMS[field.name]?.(probe.value) ?? "");
  return probe.validity.valid;
}

function write(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else field.value = value ?? "";
}

function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.type !== "number") return field.value;
  return field.value === "" ? null : Number(field.value);
}

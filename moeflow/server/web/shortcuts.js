// Keyboard shortcuts of the whole page, and the overlay that lists them. All but Escape need a modifier, so that nothing
// happens to people who type or dictate.

import { textKey, tr } from "./translate.js";

const IS_APPLE = /Mac|iP/.test(navigator.platform);
const LABELS = { Control: IS_APPLE ? "⌘" : textKey("Ctrl"), Shift: IS_APPLE ? "⇧" : textKey("Shift"), Escape: textKey("Esc"), Enter: textKey("Enter") };

export class Shortcuts {
  /** `dialog` lists them. A shortcut has `keys` such as "Control+Shift+O", a `label`, and an `action`, unless the keys
   *  are those of one field, which acts by itself. */
  constructor(dialog, shortcuts) {
    this.dialog = dialog;
    this.shortcuts = shortcuts.filter((shortcut) => shortcut.action);
    dialog.querySelector("dl").replaceChildren(...shortcuts.map(row));
    addEventListener("keydown", (event) => this.press(event));
  }

  show() {
    this.dialog.showModal();
  }

  press(event) {
    if (event.defaultPrevented || event.isComposing || isElsewhere(event)) return;
    const shortcut = this.shortcuts.find(({ keys }) => isPressed(keys, event));
    if (!shortcut) return;
    event.preventDefault();
    shortcut.action();
  }
}

/** Whether a key is for a dialog above the page, or for a field that Escape closes. */
function isElsewhere({ key, target }) {
  if (document.querySelector("dialog:modal")) return true;
  return key === "Escape" && Boolean(target.closest?.("dialog, .prompt-edit"));
}

function isPressed(keys, event) {
  const parts = keys.split("+");
  const key = parts.pop();
  const isShifted = event.key === "/" ? parts.includes("Shift") : event.shiftKey; // some keyboards have "/" above "7"
  return (
    key.toLowerCase() === latinKey(event).toLowerCase() &&
    parts.includes("Control") === (event.ctrlKey || event.metaKey) &&
    parts.includes("Shift") === isShifted &&
    !event.altKey
  );
}

/** The key; on keyboards without Latin letters, the one that has its place on those with. */
function latinKey({ key, code }) {
  return key.codePointAt(0) < 128 ? key : code.replace(/^Key/, "");
}

function row({ keys, label }) {
  const element = document.createElement("div");
  const [term, detail] = ["dt", "dd"].map((tag) => element.appendChild(document.createElement(tag)));
  term.textContent = label;
  for (const key of keys.split("+")) {
    const shown = document.createElement("kbd");
    shown.textContent = tr(LABELS[key] ?? key);
    detail.append(shown, " ");
  }
  return element;
}

// Pulls a model from the hub: its name, the progress, and how it ended. The server keeps the state.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { formatDuration } from "../manage/format.js";
import { action, Bar, Outcome } from "../manage/parts.js";

export class PullForm {
  /** `onChange()` is called when a pull has begun or ended. */
  constructor({ ask, announce }, onChange) {
    Object.assign(this, { ask, announce, onChange });
    this.input = make("input", { type: "text", placeholder: "OWNER/NAME:TAG", autocomplete: "off", spellcheck: false, required: true });
    this.button = make("button", { type: "submit", className: "primary", textContent: tr("Pull") });
    this.form = make("form", { className: "manage-form", hidden: true }, make("label", {}, tr("Name on Hugging Face"), this.input), this.button);
    this.outcome = new Outcome(); // of what the user does
    this.ended = new Outcome(); // how the last pull ended
    this.bar = new Bar(tr("Progress of the pull"), "done");
    this.line = make("p", { className: "row-line" });
    this.cancelButton = action(tr("Cancel the pull"), () => this.outcome.during(this.cancelButton, () => this.cancel()));
    const actions = make("div", { className: "row-actions" }, this.cancelButton);
    this.progress = make("div", { hidden: true }, this.line, this.bar.element, actions);
    this.element = make("div", {}, this.form, this.progress, this.outcome.element, this.ended.element);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.outcome.during(this.button, () => this.begin());
    });
  }

  /** Put a name into the field. */
  name(model) {
    this.input.value = model;
    this.input.focus();
  }

  async begin() {
    const model = this.input.value.trim();
    await this.ask("models/pull", { body: { model } });
    this.announce(tr("{model} is being pulled.", { model }));
    this.input.value = "";
    this.onChange();
  }

  async cancel() {
    await this.ask("models/pull/cancel", { body: {} });
    this.onChange();
  }

  /** `pull`: the server's, or null; `mayPull`: whether this page may begin one. */
  show(pull, mayPull) {
    const isRunning = pull?.state === "running";
    this.form.hidden = !mayPull || isRunning;
    this.progress.hidden = !isRunning;
    this.cancelButton.hidden = !mayPull;
    if (isRunning) this.showProgress(pull);
    this.ended.tell(pull && !isRunning ? endText(pull) : "", { isWrong: pull?.state === "failed" });
  }

  showProgress({ model, done_bytes, total_bytes, bytes_per_s, left_s }) {
    const parts = [model];
    if (total_bytes) parts.push(tr("{done} of {total}", { done: formatBytes(done_bytes), total: formatBytes(total_bytes) }));
    else parts.push(tr("asking the hub"));
    if (bytes_per_s) parts.push(tr("{speed}/s", { speed: formatBytes(bytes_per_s) }));
    if (left_s !== null) parts.push(tr("{time} left", { time: formatDuration(left_s) }));
    const text = parts.join(" · ");
    setText(this.line, text);
    this.bar.show(text, total_bytes ? done_bytes / total_bytes : 0);
  }
}

function endText({ model, state, error }) {
  if (state === "done") return tr("{model} is downloaded.", { model });
  if (state === "cancelled") return tr("The pull of {model} was cancelled. Its bytes are kept.", { model });
  return tr("{model} could not be pulled: {error}", { model, error });
}

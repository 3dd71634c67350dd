// Editing a prompt in its place: Enter asks anew, Escape leaves it as it is.

export class PromptEditor {
  /** `turn` is the element of the turn; `onDone(content)` gets the new prompt, and returns whether it was sent. */
  constructor(turn, onDone) {
    this.onDone = onDone;
    this.shown = turn.querySelectorAll(".prompt, .prompt-foot");
    this.form = turn.querySelector(".prompt-edit");
    this.box = this.form.querySelector("textarea");
    this.opener = turn.querySelector(".edit");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.finish();
    });
    this.form.querySelector(".cancel").addEventListener("click", () => this.cancel());
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.cancel();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.finish();
    });
  }

  open(content) {
    this.box.value = content;
    this.toggle(true);
    this.box.focus();
  }

  close() {
    this.toggle(false);
  }

  cancel() {
    this.close();
    this.opener.focus();
  }

  finish() {
    const content = this.box.value.trim();
    if (content && this.onDone(content)) this.close();
  }

  toggle(isEditing) {
    this.form.hidden = !isEditing;
    for (const part of this.shown) part.classList.toggle("is-edited", isEditing);
  }
}

// Where messages are written: the box, attached files, and the one message that waits while an answer is written.
// Emits "change" when the message in the box is another, and "send" with { content, files } in `detail` when one is to go out. Emits "refuse" with the reason why files were
// refused ("": it no longer holds), and "announce" with a text for screen readers.

import { readTextFile } from "./files.js";

export class Composer extends EventTarget {
  /** `form` holds the box; `isBusy()`: whether an answer is being written. */
  constructor(form, isBusy) {
    super();
    this.form = form;
    this.isBusy = isBusy;
    this.box = form.querySelector("textarea");
    this.picker = form.querySelector("input[type=file]");
    this.fileList = form.querySelector(".attached");
    this.queue = form.querySelector(".queued");
    this.files = [];
    this.reading = Promise.resolve(); // of the files that are being attached, one after the other
    this.numRefused = 0; // of files
    this.refusal = ""; // of the files that were attached last
    this.queued = null; // { content, files }
    this.listen();
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.box.addEventListener("input", () => this.fit());
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("paste", (event) => this.takeFiles(event, event.clipboardData));
    this.form.querySelector(".attach").addEventListener("click", () => this.picker.click());
    this.picker.addEventListener("change", () => {
      this.attach([...this.picker.files]);
      this.picker.value = "";
    });
    this.queue.querySelector("button").addEventListener("click", () => this.takeBack());
    addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      this.form.classList.add("is-target");
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) this.form.classList.remove("is-target");
    });
    addEventListener("drop", (event) => {
      this.form.classList.remove("is-target");
      this.takeFiles(event, event.dataTransfer);
    });
  }

  press(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  focus() {
    this.box.focus();
  }

  /** Send the text and attachments, or queue them until the answer ends. */
  async submit() {
    const { numRefused } = this;
    await this.reading;
    if (this.numRefused > numRefused) return; // the message would be another without its file
    const message = this.take();
    if (!message) return;
    if (this.isBusy()) this.wait(message);
    else this.send(message);
  }

  send(message) {
    this.refusal = ""; // its report is gone
    this.dispatchEvent(new CustomEvent("send", { detail: message }));
  }

  /** The text, which is removed from the box; null if it is empty. */
  take() {
    const message = { content: this.box.value.trim(), files: this.files };
    if (!message.content && !message.files.length) return null;
    this.write({ content: "", files: [] });
    return message;
  }

  write({ content, files }) {
    this.box.value = content;
    this.files = files;
    this.showFiles();
    this.fit();
  }

  // ---- one message waits

  wait(message) {
    this.queued = this.queued ? joined(this.queued, message) : message;
    this.showQueued();
    this.announce("Your message will be sent after this answer.");
  }

  /** The answer has ended: send what waits, or after a stop or a failure leave that to the user. */
  answerEnded(isDone) {
    if (!this.queued) return;
    if (!isDone) {
      this.takeBack();
      return;
    }
    const message = this.queued;
    this.queued = null;
    this.showQueued();
    this.send(message);
  }

  /** Put what waits back into the box. */
  takeBack() {
    if (!this.queued) return;
    const message = this.queued;
    this.queued = null;
    this.showQueued();
    this.putBack(message);
  }

  /** Put an unsent message back into the box, before its current text. */
  putBack(message) {
    this.write(joined(message, { content: this.box.value, files: this.files }));
    this.focus();
  }

  showQueued() {
    this.queue.hidden = !this.queued;
    this.queue.querySelector(".queued-text").textContent = this.queued ? describe(this.queued) : "";
  }

  // ---- files

  takeFiles(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.attach([...files]);
  }

  attach(files) {
    this.reading = this.reading.then(() => this.read(files));
  }

  async read(files) {
    const refusals = [];
    for (const file of files) {
      try {
        const attached = await readTextFile(file);
        this.files = [...this.files, attached];
        this.announce(`${file.name} is attached.`);
      } catch (error) {
        refusals.push(error.message);
      }
    }
    this.numRefused += refusals.length;
    this.refuse(refusals.join("\n"));
    this.showFiles();
    this.focus();
  }

  /** Report why files were refused; "" withdraws the report on the files before. */
  refuse(reason) {
    if (reason || this.refusal) this.dispatchEvent(new CustomEvent("refuse", { detail: reason }));
    this.refusal = reason;
  }

  showFiles() {
    this.dispatchEvent(new Event("change"));
    this.fileList.hidden = this.files.length === 0;
    this.fileList.replaceChildren(...this.files.map((file) => this.fileItem(file)));
  }

  fileItem(file) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      this.files = this.files.filter((it) => it !== file);
      this.showFiles();
      this.focus();
    });
    item.append(file.name, remove);
    return item;
  }

  /** Put a text in the place of a part of the message. */
  insert(text, start, end) {
    this.box.setRangeText(text, start, end, "end");
    this.fit();
    this.focus();
  }

  /** The message in the box, as it is now. */
  get draft() {
    return { content: this.box.value.trim(), files: this.files };
  }

  fit() {
    this.dispatchEvent(new Event("change"));
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }

  announce(text) {
    this.dispatchEvent(new CustomEvent("announce", { detail: text }));
  }
}

function joined(first, second) {
  return {
    content: [first.content, second.content].filter(Boolean).join("\n\n"),
    files: [...first.files, ...second.files],
  };
}

function describe({ content, files }) {
  return [...files.map((file) => file.name), content].filter(Boolean).join(" · ");
}

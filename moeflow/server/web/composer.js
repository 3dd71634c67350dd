// Where messages are written: the box, attached files, and the one message that waits while an answer is written.
// Emits "change" when the message in the box is another, and "send" with { content, files } in `detail` when one is to go out. Emits "refuse" with the reason why files were
// refused ("": it no longer holds), and "announce" with a text for screen readers.

import { takeDropped } from "./dropped_files.js";
import { readFile } from "./files.js";
import { tr } from "./translate.js";

const MAX_REASONS = 4; // that are shown of those why files were refused

export class Composer extends EventTarget {
  /** `form` holds the box; `isBusy()`: whether an answer is being written. */
  constructor(form, isBusy) {
    super();
    this.form = form;
    this.isBusy = isBusy;
    this.box = form.querySelector("textarea");
    this.sender = form.querySelector("[type=submit]");
    this.picker = form.querySelector("input[type=file]");
    this.fileList = form.querySelector(".attached");
    this.queue = form.querySelector(".queued");
    this.files = [];
    this.pending = null; // { name, progress, controller } of the file that is being read
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
    this.box.addEventListener("paste", (event) => {
      if (!event.clipboardData.types.includes("text/plain")) this.takeFiles(event, event.clipboardData); // office programs add a picture
    });
    this.form.querySelector(".attach").addEventListener("click", () => this.picker.click());
    this.picker.addEventListener("change", () => {
      const files = [...this.picker.files].map((file) => ({ file, name: file.name }));
      this.attach(async () => files);
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
    if (this.sender.disabled) return; // by the meter of the context
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
    this.announce(tr("Your message will be sent after this answer."));
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

  takeFiles(event, data) {
    if (!data.files.length) return;
    event.preventDefault();
    this.attach(takeDropped(data));
  }

  /** Attach the files that `find` returns, once those before are read. */
  attach(find) {
    this.reading = this.reading.then(() => this.read(find));
  }

  async read(find) {
    const refusals = [];
    try {
      for (const it of await find()) await this.readOne(it, refusals);
    } catch (error) {
      refusals.push(error.message); // of a folder
    }
    this.numRefused += refusals.length;
    this.refuse(reasons(refusals));
    this.showFiles();
    this.focus();
  }

  async readOne({ file, name }, refusals) {
    const controller = new AbortController();
    const { signal } = controller;
    this.pending = { name, progress: null, controller };
    const onProgress = (progress) => {
      this.pending.progress = progress;
      this.showFiles();
    };
    try {
      const attached = await readFile(file, { name, others: this.files, onProgress, signal });
      this.files = [...this.files, attached];
      this.announce(tr("{file} is attached.", { file: name }));
    } catch (error) {
      if (!signal.aborted) refusals.push(error.message);
    } finally {
      this.pending = null;
    }
  }

  /** Report why files were refused; "" withdraws the report on the files before. */
  refuse(reason) {
    if (reason || this.refusal) this.dispatchEvent(new CustomEvent("refuse", { detail: reason }));
    this.refusal = reason;
  }

  showFiles() {
    const { pending } = this;
    const isPending = Boolean(pending?.progress); // only PDFs take long
    this.dispatchEvent(new Event("change"));
    this.fileList.hidden = this.files.length === 0 && !isPending;
    const items = this.files.map((file) => fileItem(file.name, () => this.drop(file)));
    if (isPending) items.push(fileItem(progressLine(pending), () => pending.controller.abort(), pending.name));
    this.fileList.replaceChildren(...items);
  }

  drop(file) {
    this.files = this.files.filter((it) => it !== file);
    this.showFiles();
    this.focus();
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

function fileItem(text, onRemove, name = text) {
  const item = document.createElement("li");
  const remove = document.createElement("button");
  remove.type = "button";
  remove.textContent = "×";
  remove.setAttribute("aria-label", tr("Remove {name}", { name }));
  remove.addEventListener("click", onRemove);
  item.append(text, remove);
  return item;
}

function progressLine({ name, progress }) {
  return `${name} · ${tr("page {page} of {numPages}", progress)}`;
}

function reasons(refusals) {
  const more = refusals.length - MAX_REASONS;
  if (more <= 1) return refusals.join("\n");
  return [...refusals.slice(0, MAX_REASONS), tr("{count} more files are not attached.", { count: more })].join("\n");
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

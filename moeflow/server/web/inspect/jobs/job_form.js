// Starts a batch job from a file of requests, one in each line.

import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { Outcome } from "../manage/parts.js";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];
const MAX_NAME = 512; // characters of a metadata value
const PEEK_BYTES = 2 ** 16; // of a file, enough for its first line

export class JobForm {
  /** `onStart(job)` gets each new job. */
  constructor({ ask, announce }, onStart) {
    Object.assign(this, { ask, announce, onStart });
    this.file = make("input", { type: "file", accept: ".jsonl,.ndjson,application/jsonl" });
    this.endpoint = make("select", {}, ...ENDPOINTS.map((name) => new Option(name)));
    this.name = make("input", { type: "text", maxLength: MAX_NAME, autocomplete: "off" });
    this.start = make("button", { type: "submit", className: "primary", textContent: tr("Start") });
    this.outcome = new Outcome();
    this.drop = make("label", { className: "drop" }, make("span", { textContent: tr("Drop a .jsonl file here, or choose one") }), this.file);
    const named = (text, control) => make("label", {}, text, control);
    this.form = make("form", { className: "manage-form" }, this.drop, named(tr("Endpoint"), this.endpoint), named(tr("Name"), this.name), this.start);
    this.element = make("div", {}, this.form, this.outcome.element);
    this.listen();
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.file.addEventListener("change", () => this.describe());
    for (const kind of ["dragenter", "dragover"]) {
      this.drop.addEventListener(kind, (event) => {
        event.preventDefault();
        event.stopPropagation(); // the composer takes files, too
        this.drop.classList.add("is-target");
      });
    }
    for (const kind of ["dragleave", "drop"]) this.drop.addEventListener(kind, () => this.drop.classList.remove("is-target"));
    this.drop.addEventListener("drop", (event) => {
      event.preventDefault();
      event.stopPropagation();
      if (!event.dataTransfer.files.length) return;
      this.file.files = event.dataTransfer.files;
      this.describe();
    });
  }

  /** Take name and endpoint from a file, as far as it tells. */
  async describe() {
    const [file] = this.file.files;
    if (!file) return;
    this.name.value ||= file.name.replace(/\.(jsonl|ndjson)$/, "").slice(0, MAX_NAME);
    const [first] = (await file.slice(0, PEEK_BYTES).text()).split("\n");
    try {
      const { url } = JSON.parse(first);
      if (ENDPOINTS.includes(url)) this.endpoint.value = url;
    } catch {
      // The server reports the mistake.
    }
  }

  async submit() {
    const [file] = this.file.files;
    if (!file) {
      this.outcome.tell(tr("Choose a file first."), { isWrong: true });
      this.file.focus();
      return;
    }
    const isBegun = await this.outcome.during(this.start, async () => this.onStart(await this.begin(file)));
    if (!isBegun) return;
    this.form.reset();
    this.announce(tr("The job is started."));
  }

  async begin(file) {
    const upload = new FormData();
    upload.append("purpose", "batch");
    upload.append("file", file);
    const { id } = await this.ask("v1/files", { body: upload });
    const name = this.name.value.trim();
    const metadata = name ? { metadata: { name } } : {};
    return this.ask("v1/batches", { body: { input_file_id: id, endpoint: this.endpoint.value, completion_window: "24h", ...metadata } });
  }
}

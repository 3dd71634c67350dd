// One batch job: how far it is, what went wrong, and its files.

import { saveBlob } from "../../save_file.js";
import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { formatDuration, formatTime } from "../manage/format.js";
import { action, Bar, rowFrame, stateText } from "../manage/parts.js";
import { JobSpeed } from "./job_speed.js";

export const ENDED = ["failed", "completed", "expired", "cancelled"];
const MAX_PROBLEMS = 20;
const MAX_ERROR_FILE_BYTES = 2 ** 22; // larger ones are for programs

export class JobRow {
  /** `context` is the view's, `outcome` has the line for what goes wrong. */
  constructor(job, { ask, askFile, announce }, outcome) {
    Object.assign(this, { ask, askFile, announce, outcome, job });
    this.speed = new JobSpeed();
    this.name = job.metadata?.name || job.id;
    this.frame = rowFrame(this.name);
    this.element = this.frame.element;
    this.bar = new Bar(tr("Progress of {name}", { name: this.name }), "done", "failed");
    this.problems = make("ul", { className: "row-problems" });
    this.failures = this.makeFailures();
    this.frame.line.after(this.bar.element, this.problems, this.failures);
    this.buttons = this.makeButtons();
    this.frame.actions.append(...Object.values(this.buttons));
  }

  makeButtons() {
    const path = (id) => `v1/files/${encodeURIComponent(id)}/content`;
    const save = (kind, button) =>
      this.outcome.during(button, async () => saveBlob(`${this.name}.${kind}.jsonl`, await this.askFile(path(this.job[`${kind}_file_id`]))));
    return {
      cancel: action(tr("Cancel"), ({ currentTarget }) => this.outcome.during(currentTarget, () => this.cancel())),
      output: action(tr("Download answers"), ({ currentTarget }) => save("output", currentTarget)),
      error: action(tr("Download errors"), ({ currentTarget }) => save("error", currentTarget)),
    };
  }

  makeFailures() {
    const list = make("ul", { className: "row-problems" });
    const details = make("details", { hidden: true }, make("summary", { textContent: tr("Failed requests") }), list);
    details.addEventListener("toggle", () => {
      if (details.open && !list.childElementCount) this.outcome.during(details, () => this.listFailures(list));
    });
    return details;
  }

  async cancel() {
    this.update(await this.ask(`v1/batches/${encodeURIComponent(this.job.id)}/cancel`, { body: {} }));
    this.announce(tr("{name} is cancelled.", { name: this.name }));
  }

  /** List the first requests that failed, by their ids. */
  async listFailures(list) {
    const id = encodeURIComponent(this.job.error_file_id);
    const { bytes } = await this.ask(`v1/files/${id}`);
    if (bytes > MAX_ERROR_FILE_BYTES) {
      list.append(make("li", { textContent: tr("There are too many to list here. Download the errors.") }));
      return;
    }
    const lines = (await (await this.askFile(`v1/files/${id}/content`)).text()).split("\n").filter(Boolean);
    const texts = lines.slice(0, MAX_PROBLEMS).map((line) => failureText(JSON.parse(line)));
    list.append(...shortened(texts, lines.length));
  }

  update(job) {
    this.job = job;
    const { status } = job;
    if (status === "in_progress") this.speed.note(job);
    setText(this.frame.state, stateText(status));
    this.frame.state.classList.toggle("is-wrong", status === "failed" || status === "expired");
    this.frame.state.classList.toggle("is-good", status === "completed");
    const text = this.text();
    setText(this.frame.line, text);
    const { total, completed, failed } = job.request_counts;
    this.bar.element.hidden = !total;
    this.bar.show(text, total ? completed / total : 0, total ? failed / total : 0);
    const errors = job.errors?.data ?? [];
    if (this.problems.childElementCount === 0) this.problems.append(...shortened(errors.slice(0, MAX_PROBLEMS).map(problemText), errors.length));
    this.failures.hidden = !job.error_file_id;
    this.buttons.cancel.hidden = ENDED.includes(status) || status === "cancelling";
    this.buttons.output.hidden = !job.output_file_id;
    this.buttons.error.hidden = !job.error_file_id;
  }

  text() {
    const { job, speed } = this;
    const { total, completed, failed } = job.request_counts;
    const parts = [`${job.model} · ${job.endpoint}`, formatTime(job.created_at)];
    if (total) parts.push(tr("{done} of {total} requests done", { done: formatNumber(completed + failed), total: formatNumber(total) }));
    if (failed) parts.push(tr("{failed} failed", { failed }));
    if (job.usage.output_tokens) parts.push(tr("{tokens} tokens generated", { tokens: formatNumber(job.usage.output_tokens) }));
    if (job.status === "in_progress") {
      const left = speed.leftS(total - completed - failed);
      if (speed.tokensPerS) parts.push(tr("{speed} tokens/s", { speed: formatNumber(speed.tokensPerS, 1) }));
      parts.push(left === null ? tr("time left: being measured") : tr("{time} left", { time: formatDuration(left) }));
    }
    return parts.join(" · ");
  }
}

function problemText({ line, message }) {
  return line === null ? message : tr("Line {line}: {message}", { line, message });
}

function failureText({ custom_id, error, response }) {
  return `${custom_id}: ${error?.message ?? response?.body?.error?.message ?? ""}`;
}

/** List items of the first texts of so many. */
function shortened(texts, total) {
  const more = total > texts.length ? [tr("{count} more", { count: total - texts.length })] : [];
  return [...texts, ...more].map((textContent) => make("li", { textContent }));
}

// Batch jobs: start, progress, errors, results.

import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { Outcome, Rows, section, useStyle } from "../manage/parts.js";
import { JobForm } from "./job_form.js";
import { ENDED, JobRow } from "./job_row.js";

const MAX_JOBS = 100; // that the server lists at once

const RESTING_MS = 5000; // between two looks while no job is at work, or the server has no place for jobs

export default class JobsView {
  static periodMs = 1000;

  constructor(element, context) {
    useStyle();
    this.ask = context.ask;
    this.isResting = false;
    this.lookedAtMs = -Infinity;
    this.failure = null; // of the last look
    this.outcome = new Outcome();
    this.rows = new Rows((job) => new JobRow(job, context, this.outcome), tr("There are no jobs yet."));
    this.more = make("p", { className: "hint", hidden: true, textContent: tr("Older jobs are not shown.") });
    const form = new JobForm(context, () => this.look());
    this.content = make("div", { hidden: true }); // until the server has answered: it may have no place for files
    this.content.append(section(tr("New batch job"), form.element), section(tr("Batch jobs"), this.outcome.element, this.rows.element, this.more));
    element.append(this.content);
  }

  /** Look now, whenever the last look was. */
  look() {
    this.isResting = false;
    return this.update();
  }

  hide() {
    this.isResting = false; // the next look is at once
  }

  async update(signal) {
    if (!this.isResting || performance.now() - this.lookedAtMs >= RESTING_MS) await this.lookOnce(signal);
    if (this.failure) throw this.failure;
  }

  async lookOnce(signal) {
    try {
      this.show(await this.ask(`v1/batches?limit=${MAX_JOBS}`, { signal }));
      this.failure = null;
    } catch (error) {
      signal?.throwIfAborted();
      this.failure = error;
      this.isResting = true;
    }
    this.lookedAtMs = performance.now();
  }

  show({ data, has_more }) {
    this.content.hidden = false;
    this.isResting = data.every(({ status }) => ENDED.includes(status));
    this.rows.show(data, (job) => job.id);
    this.more.hidden = !has_more;
  }
}

// Batch jobs: start, progress, errors, results.

import { explain } from "../../chat/explain.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { Outcome, Refusal, Rows, section, useStyle } from "../manage/parts.js";
import { JobForm } from "./job_form.js";
import { ENDED, JobRow } from "./job_row.js";

const MAX_JOBS = 100; // that the server lists at once

const NO_FOLDER = "no_data_folder"; // the server's code
const REFUSED_MS = 60_000; // between two looks while the server has no place for files
const RESTING_MS = 5000; // between two looks while no job is at work

export default class JobsView {
  static periodMs = 1000;

  constructor(element, context) {
    useStyle();
    this.ask = context.ask;
    this.restMs = 0;
    this.lookedAtMs = -Infinity;
    this.outcome = new Outcome();
    this.rows = new Rows((job) => new JobRow(job, context, this.outcome), tr("There are no jobs yet."));
    this.more = make("p", { className: "hint", hidden: true, textContent: tr("Older jobs are not shown.") });
    const form = new JobForm(context, () => this.look());
    this.content = make("div", { hidden: true }); // until the server has answered: it may have no place for files
    this.content.append(section(tr("New batch job"), form.element), section(tr("Batch jobs"), this.outcome.element, this.rows.element, this.more));
    this.refusal = new Refusal();
    element.append(this.refusal.element, this.content);
  }

  /** Look now, whenever the last look was. */
  look() {
    this.restMs = 0;
    return this.update();
  }

  hide() {
    this.restMs = 0; // the next look is at once
  }

  async update(signal) {
    if (performance.now() - this.lookedAtMs < this.restMs) return;
    try {
      this.show(await this.ask(`v1/batches?limit=${MAX_JOBS}`, { signal }));
    } catch (error) {
      if (error.code !== NO_FOLDER) throw error;
      this.refuse(error);
    }
    this.lookedAtMs = performance.now();
  }

  refuse(error) {
    this.refusal.show(explain(error));
    this.content.hidden = true;
    this.restMs = REFUSED_MS;
  }

  show({ data, has_more }) {
    this.refusal.show("");
    this.content.hidden = false;
    this.restMs = data.every(({ status }) => ENDED.includes(status)) ? RESTING_MS : 0;
    this.rows.show(data, (job) => job.id);
    this.more.hidden = !has_more;
  }
}

// How fast a job goes, measured between readings of its counts.

const WINDOW_MS = 30_000;

export class JobSpeed {
  constructor() {
    this.readings = []; // { atMs, requests, tokens }, oldest first
  }

  /** Take a reading of a job in progress. */
  note(job, atMs = performance.now()) {
    const { completed, failed } = job.request_counts;
    this.readings.push({ atMs, requests: completed + failed, tokens: job.usage.output_tokens });
    while (this.readings.length > 2 && atMs - this.readings[1].atMs > WINDOW_MS) this.readings.shift();
  }

  /** Generated tokens per second; null until they can be measured. */
  get tokensPerS() {
    return this.perS("tokens");
  }

  /** Seconds for so many more requests at this speed; null if that is not known. */
  leftS(numRequests) {
    const perS = this.perS("requests");
    return perS ? numRequests / perS : null;
  }

  perS(what) {
    const [first, last] = [this.readings[0], this.readings.at(-1)];
    const seconds = first ? (last.atMs - first.atMs) / 1000 : 0;
    return seconds >= 2 && last[what] > first[what] ? (last[what] - first[what]) / seconds : null;
  }
}

// The part of the time that is shown.

const LEAST_US = 1;

export class TimeWindow {
  constructor() {
    this.end = 0; // of the time that there is
    this.showAll();
  }

  get isWhole() {
    return this.from === 0 && this.to === this.end;
  }

  /** There is so much time now; all of it is shown. */
  setEnd(end) {
    this.end = end;
    this.showAll();
  }

  showAll() {
    this.from = 0;
    this.to = this.end;
  }

  /** Show `factor` times as much time; the moment `around` keeps its place. */
  zoom(factor, around = (this.from + this.to) / 2) {
    const length = this.to - this.from;
    const wanted = Math.min(Math.max(length * factor, LEAST_US), this.end);
    const share = length ? (around - this.from) / length : 0;
    this.moveTo(around - share * wanted, wanted);
  }

  /** Show what is `us` later. */
  pan(us) {
    this.moveTo(this.from + us, this.to - this.from);
  }

  /** Have a span in sight. */
  reveal({ start, end }) {
    const length = this.to - this.from;
    if (start >= this.from && end <= this.to) return;
    this.moveTo((start + end - length) / 2, length);
  }

  /** Show a span and a little on both sides. */
  zoomTo({ start, end }) {
    const margin = (end - start) / 10;
    this.moveTo(start - margin, Math.max(end - start + 2 * margin, LEAST_US));
  }

  moveTo(from, length) {
    const kept = Math.min(length, this.end);
    this.from = Math.min(Math.max(from, 0), this.end - kept);
    this.to = this.from + kept;
  }
}

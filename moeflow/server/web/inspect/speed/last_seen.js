// The last measurements, kept with their age when the server has none: it forgets them after a minute.

export class LastSeen {
  constructor() {
    this.model = null; // the name of the model that they are of
    this.points = {}; // by kind: { value, atMs }
    this.rows = {}; // of the comparison, by figure, likewise
  }

  /** Return the answer of /stats/speed with the last measurements in the place of missing ones. */
  complete(seen) {
    const name = seen.model?.name ?? null;
    if (name !== this.model) Object.assign(this, new LastSeen(), { model: name });
    const nowMs = performance.now();
    const aged = (it, atMs) => ({ ...it, age_s: it.age_s + (nowMs - atMs) / 1000 });
    const kept = (store, key, value) => {
      if (value) store[key] = { value, atMs: nowMs };
      return store[key];
    };
    const now = { ...seen.now };
    for (const kind of ["decode", "prompts"]) {
      const last = kept(this.points, kind, now[kind]);
      now[kind] = last ? aged(last.value, last.atMs) : null;
    }
    const predicted = seen.predicted.map((row) => {
      const last = kept(this.rows, row.figure, row.measured && row);
      return last ? { ...row, ...last.value, planned: row.planned, measured: aged(last.value.measured, last.atMs) } : row;
    });
    return { ...seen, now, predicted };
  }
}

// The points of the roofline as a table: for reading exactly, and for screen readers.

import { make } from "../elements.js";
import { fillTable, scrolledTable } from "../tables.js";
import { formatPercent, tr } from "../../translate.js";
import { marksOf } from "./roofline.js";
import { decimal, digits, seconds } from "./units.js";

export class PointTable {
  constructor() {
    this.columns = [tr("Point"), tr("FLOP per byte"), tr("FLOP/s"), tr("Read"), tr("Pass"), tr("Of the roof")];
    const { table, box } = scrolledTable(tr("Points of the chart"));
    this.table = table;
    this.element = make("details", {}, make("summary", { textContent: tr("Points of the chart in numbers") }), box);
  }

  /** `seen` is the answer of /stats/speed. */
  show(seen) {
    const hasRoofs = Boolean(seen.roofs?.memory_bytes_per_s);
    this.element.hidden = !hasRoofs;
    if (!hasRoofs) return;
    fillTable(this.table, this.columns, marksOf(seen).map((mark) => rowOf(mark, seen.now)));
  }
}

function rowOf(mark, now) {
  return [
    mark.name(),
    digits(mark.intensity),
    decimal(mark.flopsPerS, "FLOP/s"),
    decimal(mark.flopsPerS / mark.intensity, "B/s"),
    mark.isMeasured ? seconds(now[mark.kind].pass_s) : "–",
    mark.share === null ? "–" : formatPercent(mark.share),
  ];
}

// The points of the roofline as a table: for reading exactly, and for screen readers.

import { make } from "../elements.js";
import { tr } from "../../translate.js";
import { marksOf } from "./roofline.js";
import { table, tableBody, tableRow } from "./table.js";
import { decimal, digits, percent, seconds } from "./units.js";

export class PointTable {
  constructor() {
    const columns = [tr("Point"), tr("FLOP per byte"), tr("FLOP/s"), tr("Read"), tr("Pass"), tr("Of the roof")];
    this.body = tableBody();
    const box = make("div", { className: "speed-box", tabIndex: 0, role: "region", "aria-label": tr("Points of the chart") }, table("speed-table", columns, this.body));
    this.element = make("details", {}, make("summary", { textContent: tr("Points of the chart in numbers") }), box);
  }

  /** `seen` is the answer of /stats/speed. */
  show(seen) {
    const hasRoofs = Boolean(seen.roofs?.memory_bytes_per_s);
    this.element.hidden = !hasRoofs;
    if (!hasRoofs) return;
    this.body.replaceChildren(
      ...marksOf(seen).map((mark) => {
        const point = mark.isMeasured ? seen.now[mark.kind] : null;
        const cells = [
          digits(mark.intensity),
          decimal(mark.flopsPerS, "FLOP/s"),
          decimal(mark.flopsPerS / mark.intensity, "B/s"),
          point ? seconds(point.pass_s) : "–",
          mark.share === null ? "–" : percent(mark.share),
        ];
        return tableRow(mark.name(), cells.map((textContent) => make("td", { role: "cell", textContent })));
      }),
    );
  }
}

// What colours and patterns of the time line mean.

import { make } from "../elements.js";
import { tr } from "../../translate.js";

export function legend() {
  return make(
    "ul",
    { className: "timeline-legend" },
    make("li", { className: "works", textContent: tr("works") }),
    make("li", { className: "waits", textContent: tr("waits: for a disk, a copy, or another process") }),
  );
}

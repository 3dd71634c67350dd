// The engines behind the model, their ranks and lenders, the machines that have them, and the processes for HTTP.

import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { Outcome, Refusal, Rows, section, useStyle } from "../manage/parts.js";
import { hosts } from "./machine_facts.js";
import { FrontRow, HostRow, LenderRow, RankRow, ReplicaRow } from "./machine_rows.js";

const MOST_REPLICAS = 4096;
const numbered = (items, name) => items.map((item, number) => ({ number, [name]: item }));

export default class MachinesView {
  static periodMs = 1000;

  constructor(element, { ask, announce }) {
    useStyle();
    Object.assign(this, { ask, announce });
    this.outcome = new Outcome();
    this.refusal = new Refusal();
    this.number = make("input", { type: "number", min: "1", max: String(MOST_REPLICAS), step: "1", required: true });
    this.scaleButton = make("button", { type: "submit", className: "secondary", textContent: tr("Change") });
    this.form = make("form", { className: "manage-form", hidden: true }, make("label", { className: "number" }, tr("Replicas"), this.number), this.scaleButton);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.outcome.during(this.scaleButton, () => this.scale());
    });
    this.imbalance = make("p", { className: "row-line" });
    this.replicas = new Rows((item) => new ReplicaRow(item), tr("No engine runs: no model is loaded."));
    this.parts = {
      ranks: this.part(tr("Ranks"), RankRow, this.imbalance),
      lenders: this.part(tr("Lenders"), LenderRow),
      hosts: this.part(tr("Hosts"), HostRow),
      fronts: this.part(tr("HTTP processes"), FrontRow),
    };
    element.append(
      section(tr("Replicas"), this.replicas.element, this.form, this.refusal.element, this.outcome.element),
      ...Object.values(this.parts).map(({ element: part }) => part),
    );
  }

  /** A section that is shown only where it has rows. */
  part(title, Row, ...before) {
    const rows = new Rows((item) => new Row(item), "");
    return { rows, element: section(title, ...before, rows.element) };
  }

  async update(signal) {
    const [stats, { num_replicas, scale_refusal, fronts }] = await Promise.all([this.ask("stats", { signal }), this.ask("replicas", { signal })]);
    this.replicas.show(numbered(stats.replicas, "replica"), ({ number }) => number);
    this.show("ranks", numbered(stats.ranks, "rank"), ({ number }) => number);
    this.show("lenders", stats.lenders, ({ address }) => address);
    const machines = hosts(stats);
    this.show("hosts", machines.length > 1 ? machines : [], ({ name }) => name);
    this.show("fronts", fronts, ({ number }) => number);
    const { rank_imbalance: imbalance } = stats;
    setText(this.imbalance, imbalance ? tr("Imbalance {imbalance}: tokens of the rank that has most, over the mean", { imbalance: formatNumber(imbalance, 2) }) : "");
    this.form.hidden = Boolean(scale_refusal);
    this.refusal.show(scale_refusal && tr("The number of replicas cannot be changed: {reason}", { reason: scale_refusal }));
    if (document.activeElement !== this.number) this.number.value = String(num_replicas);
  }

  show(name, items, keyOf) {
    const { rows, element } = this.parts[name];
    element.hidden = items.length === 0;
    rows.show(items, keyOf);
  }

  async scale() {
    const { num_replicas_before: before, num_replicas: number } = await this.ask("replicas", { body: { num_replicas: Number(this.number.value) } });
    this.announce(tr("{before} replicas become {number}.", { before, number }));
  }
}

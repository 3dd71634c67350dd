// The served models, the models on the disk, and the pull of another one.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { explain } from "../../chat/explain.js";
import { Outcome, Refusal, Rows, section, useStyle } from "../manage/parts.js";
import { LocalRow, ServedRow, UnfinishedRow } from "./model_rows.js";
import { PullForm } from "./pull_form.js";

const LOCAL_PERIOD_MS = 15_000; // the server reads the headers of all models

export default class ModelsView {
  static periodMs = 1500;

  constructor(element, context) {
    useStyle();
    this.context = context;
    this.local = null; // the newest answer of /models/local
    this.localAtMs = -Infinity;
    this.cards = new Map(); // answers of /v1/models, by the model's name
    this.outcome = new Outcome();
    this.refusal = new Refusal();
    this.loadRefusal = new Refusal();
    this.disk = make("p", { className: "row-line" });
    this.pull = new PullForm(context, () => this.changed());
    const doing = { change: (button, what, model) => this.change(button, what, model), may: (what) => this.may(what) };
    this.served = new Rows((model) => new ServedRow(model, doing), tr("No model is known yet."));
    this.downloaded = new Rows((model) => new LocalRow(model, doing), tr("No model is downloaded."));
    this.unfinished = new Rows((part) => new UnfinishedRow(part, (repo) => this.pull.name(repo), doing), "");
    this.pullSection = section(tr("Pull a model"), this.pull.element);
    this.content = make("div", { hidden: true }); // until the server has answered
    this.content.append(
      this.refusal.element,
      this.outcome.element,
      section(tr("Served models"), this.loadRefusal.element, this.served.element),
      this.pullSection,
      section(tr("Downloaded models"), this.disk, this.downloaded.element, this.unfinished.element),
    );
    element.append(this.content);
  }

  async update(signal) {
    const stats = await this.context.ask("stats", { signal });
    await this.look(signal);
    this.show(stats);
  }

  /** Ask what the served models are; nothing is known while the server is loading its one model. */
  async lookAtCards(signal) {
    try {
      const { data } = await this.context.ask("v1/models", { signal });
      this.cards = new Map(data.map((card) => [card.id, card]));
    } catch (error) {
      if (error.code !== "model_loading") throw error;
    }
  }

  /** Ask for the downloaded models now and then, and for the pull while it runs. */
  async look(signal) {
    try {
      if (performance.now() - this.localAtMs >= LOCAL_PERIOD_MS) {
        await this.lookAtCards(signal);
        this.local = await this.context.ask("models/local", { signal });
        this.localAtMs = performance.now();
      } else if (this.local?.pull?.state === "running") {
        this.local.pull = (await this.context.ask("models/pull", { signal })).pull;
        if (this.local.pull?.state !== "running") this.changed();
      }
    } catch (error) {
      if (error.status !== 403) throw error;
      this.local = { models: [], unfinished_bytes: {}, change_refusal: explain(error), load_refusal: "", pull: null };
      this.localAtMs = performance.now();
    }
  }

  show(stats) {
    const { local, cards } = this;
    this.content.hidden = false;
    this.refusal.show(local.change_refusal);
    this.loadRefusal.show(local.change_refusal ? "" : local.load_refusal);
    this.served.show(
      stats.models.filter(({ name }) => name).map((model) => ({ ...model, card: cards.get(model.name) })),
      ({ name }) => name,
    );
    this.pullSection.hidden = Boolean(local.change_refusal) && !local.pull;
    this.pull.show(local.pull, !local.change_refusal);
    this.downloaded.show(local.models, ({ name }) => name);
    const parts = Object.entries(local.unfinished_bytes).map(([repo, bytes]) => ({ repo, bytes }));
    this.unfinished.show(local.pull?.state === "running" ? [] : parts, ({ repo }) => repo);
    if (local.free_bytes !== undefined) {
      setText(this.disk, tr("{used} used, {free} free on the disk", { used: formatBytes(local.used_bytes), free: formatBytes(local.free_bytes) }));
    }
  }

  /** Whether something may be done here: "change" anything, or "load" models. */
  may(what) {
    return Boolean(this.local) && !this.local.change_refusal && !(what === "load" && this.local.load_refusal);
  }

  async change(button, what, model) {
    if (await this.outcome.during(button, () => this.context.ask(`models/${what}`, { body: { model } }))) {
      this.context.announce(what === "load" ? tr("{model} is loaded.", { model }) : tr("{model} is unloaded.", { model }));
      this.changed();
    }
  }

  /** The models may have changed: the next look is at once, and the page offers them. */
  changed() {
    this.localAtMs = -Infinity;
    this.context.server.dispatchEvent(new Event("models"));
  }
}

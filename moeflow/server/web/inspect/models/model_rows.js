// Rows of models: served, downloaded, or downloaded in part.

import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { formatBytes } from "../bytes.js";
import { formatTime } from "../manage/format.js";
import { action, rowFrame, stateText } from "../manage/parts.js";

/** A model that is served, loaded or not. */
export class ServedRow {
  /** `doing` has change(button, what, model), and may(what): whether that is possible here. */
  constructor({ name }, doing) {
    this.doing = doing;
    this.frame = rowFrame(name);
    this.element = this.frame.element;
    this.load = action(tr("Load"), ({ currentTarget }) => doing.change(currentTarget, "load", name));
    this.unload = action(tr("Unload"), ({ currentTarget }) => doing.change(currentTarget, "unload", name));
    this.frame.actions.append(this.load, this.unload);
  }

  update({ status, memory_bytes, num_loads, card }) {
    setText(this.frame.state, stateText(status));
    this.frame.state.classList.toggle("is-good", status === "ready");
    this.frame.state.classList.toggle("is-wrong", status === "failed" || status === "stalled");
    const parts = [];
    if (card?.meta.size) parts.push(tr("{size} on the disk", { size: formatBytes(card.meta.size) }));
    if (memory_bytes) parts.push(tr("may hold {size} of memory", { size: formatBytes(memory_bytes) }));
    if (card?.context_length) parts.push(tr("context of {tokens} tokens", { tokens: formatNumber(card.context_length) }));
    if (num_loads) parts.push(num_loads === 1 ? tr("loaded once") : tr("loaded {count} times", { count: num_loads }));
    setText(this.frame.line, parts.join(" · "));
    const may = this.doing.may("load");
    this.load.hidden = !may || status !== "unloaded";
    this.unload.hidden = !may || status !== "ready";
  }
}

/** A model in the hub's cache. */
export class LocalRow {
  constructor({ name }, doing) {
    this.doing = doing;
    this.frame = rowFrame(name);
    this.element = this.frame.element;
    this.load = action(tr("Load"), ({ currentTarget }) => doing.change(currentTarget, "load", name));
    this.frame.actions.append(this.load);
  }

  update(model) {
    setText(this.frame.state, model.served_as ? tr("served") : (model.family ?? tr("cannot be run")));
    this.frame.state.classList.toggle("is-wrong", model.problem !== null);
    const used = tr("used {time}", { time: formatTime(model.last_used_s) });
    const parts = [model.format, formatBytes(model.size_bytes), used, ...(model.problem ? [model.problem] : [])];
    setText(this.frame.line, parts.join(" · "));
    this.load.hidden = !this.doing.may("load") || Boolean(model.served_as) || model.problem !== null;
  }
}

/** What an interrupted pull has left. */
export class UnfinishedRow {
  /** `onResume(repo)` names it for the next pull. */
  constructor({ repo }, onResume, doing) {
    this.doing = doing;
    this.frame = rowFrame(repo);
    this.element = this.frame.element;
    setText(this.frame.state, tr("not complete"));
    this.resume = action(tr("Resume…"), () => onResume(repo));
    this.frame.actions.append(this.resume);
  }

  update({ bytes }) {
    setText(this.frame.line, tr("{size} of an interrupted pull", { size: formatBytes(bytes) }));
    this.resume.hidden = !this.doing.may("change");
  }
}

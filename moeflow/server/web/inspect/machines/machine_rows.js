// Rows of engines, ranks, lenders, HTTP processes and machines.

import { setText } from "../../set_text.js";
import { formatNumber, formatPercent, tr } from "../../translate.js";
import { Bar, rowFrame, stateText } from "../manage/parts.js";
import { hostName, hostText, rankShares, rankText, replicaText } from "./machine_facts.js";

/** A row without buttons: a name, a state, a line of text. */
class PlainRow {
  constructor(name) {
    this.frame = rowFrame(name);
    this.element = this.frame.element;
  }

  write(state, line, { isGood = false, isWrong = false } = {}) {
    setText(this.frame.state, state);
    setText(this.frame.line, line);
    this.frame.state.classList.toggle("is-good", isGood);
    this.frame.state.classList.toggle("is-wrong", isWrong);
  }
}

/** An engine. */
export class ReplicaRow extends PlainRow {
  constructor({ number }) {
    super(tr("Replica {number}", { number }));
    this.bar = new Bar(tr("KV cache of replica {number}", { number }), "done");
    this.frame.line.after(this.bar.element);
  }

  update({ replica }) {
    const where = hostName(replica.host);
    const isReady = replica.state === "ready";
    const state = isReady && replica.is_slow ? tr("slow: gets no new requests") : stateText(replica.state);
    this.write(`${where} · ${state}`, replicaText(replica), { isGood: isReady && !replica.is_slow, isWrong: replica.is_slow || replica.state === "gone" || replica.state === "stalled" });
    this.bar.element.hidden = !isReady || !replica.kv_blocks_total;
    const share = replica.kv_blocks_total ? replica.kv_blocks_used / replica.kv_blocks_total : 0;
    this.bar.show(formatPercent(share), share);
  }
}

/** One of the processes that share a model. */
export class RankRow extends PlainRow {
  constructor({ number }) {
    super(tr("Rank {number}", { number }));
    this.before = null;
    this.shares = ""; // of time, lately
    this.bar = new Bar(tr("Time of rank {number}: busy, and waiting for others", { number }), "busy", "waited");
    this.frame.line.after(this.bar.element);
  }

  update({ rank }) {
    const where = hostName(rank.host);
    const text = rank.is_slow ? `${where} · ${tr("slow: the others wait for it")}` : where;
    const [busy, waited] = rankShares(rank, this.before);
    if (busy || waited) { // else there was no pass, and the last shares stay
      this.before = rank;
      this.shares = tr("lately {busy} busy, {waited} waiting", { busy: formatPercent(busy), waited: formatPercent(waited) });
      this.bar.show(this.shares, busy, waited);
    }
    this.write(text, [rankText(rank), this.shares].filter(Boolean).join(" · "), { isWrong: rank.is_slow });
  }
}

/** A machine that lends memory for experts. */
export class LenderRow extends PlainRow {
  constructor({ address }) {
    super(address);
  }

  update({ state, num_experts }) {
    const isConnected = state === "connected";
    this.write(isConnected ? tr("connected") : state, tr("{count} experts", { count: num_experts }), { isGood: isConnected, isWrong: !isConnected });
  }
}

/** A process that answers HTTP. */
export class FrontRow extends PlainRow {
  constructor({ number }) {
    super(tr("HTTP process {number}", { number }));
  }

  update({ is_ready, stopped_s }) {
    const isStopped = stopped_s > 0;
    const state = isStopped ? tr("stopped for {seconds} s", { seconds: formatNumber(stopped_s, 1) }) : is_ready ? tr("ready") : tr("starting");
    this.write(state, "", { isGood: is_ready && !isStopped, isWrong: isStopped });
  }
}

/** A machine. */
export class HostRow extends PlainRow {
  constructor({ name }) {
    super(hostName(name));
  }

  update(host) {
    this.write("", hostText(host));
  }
}

// Texts about engines, ranks, lenders and machines, from a reading of /stats.

import { kvText } from "../../facts.js";
import { formatNumber, tr } from "../../translate.js";

const OWN = ""; // the name of the server's own machine in /stats

/** What an engine does. */
export function replicaText(replica) {
  if (replica.state !== "ready") return replica.activity;
  const parts = [
    tr("{count} running", { count: replica.num_running }),
    tr("{count} waiting", { count: replica.num_waiting }),
    tr("{speed} tokens/s", { speed: formatNumber(replica.tokens_per_second, 0) }),
    tr("KV cache {share}", { share: kvText(replica) }),
  ];
  if (replica.engine_restarts_total) parts.push(tr("{count} restarts", { count: replica.engine_restarts_total }));
  return parts.join(" · ");
}

/** What one of the processes that share a model has to do. */
export function rankText(rank) {
  const parts = [];
  if (rank.num_layers) parts.push(tr("layers {first} to {last}", { first: rank.first_layer, last: rank.first_layer + rank.num_layers - 1 }));
  if (rank.num_experts) parts.push(tr("{count} experts", { count: rank.num_experts }));
  if (rank.tokens_per_pass) parts.push(tr("{count} tokens in a pass", { count: formatNumber(rank.tokens_per_pass, 1) }));
  parts.push(tr("busy {seconds} s", { seconds: formatNumber(rank.busy_s_total, 1) }));
  parts.push(tr("waited {seconds} s", { seconds: formatNumber(rank.waited_s_total, 1) }));
  return parts.join(" · ");
}

/** The shares of time that a rank was busy and waited since an earlier reading of it; zeros if there was no pass. */
export function rankShares(rank, before) {
  const busyS = rank.busy_s_total - (before?.busy_s_total ?? 0);
  const waitedS = rank.waited_s_total - (before?.waited_s_total ?? 0);
  const totalS = busyS + waitedS;
  return totalS > 0 ? [busyS / totalS, waitedS / totalS] : [0, 0];
}

/** What each machine has, by its name, in the order of their first part. */
export function hosts({ replicas, ranks, lenders }) {
  const found = new Map();
  const at = (name) => {
    if (!found.has(name)) found.set(name, { name, replicas: 0, ranks: 0, lenders: 0 });
    return found.get(name);
  };
  for (const { host } of replicas) at(host).replicas += 1;
  for (const { host } of ranks) at(host).ranks += 1;
  for (const { address } of lenders) at(address).lenders += 1;
  return [...found.values()];
}

/** What runs on a machine. */
export function hostText({ replicas, ranks, lenders }) {
  const parts = [];
  if (replicas) parts.push(replicas === 1 ? tr("1 replica") : tr("{count} replicas", { count: replicas }));
  if (ranks) parts.push(ranks === 1 ? tr("1 rank") : tr("{count} ranks", { count: ranks }));
  if (lenders) parts.push(tr("lends memory for experts"));
  return parts.join(" · ");
}

/** The name of a machine for people. */
export const hostName = (name) => (name === OWN ? tr("the server’s machine") : name);

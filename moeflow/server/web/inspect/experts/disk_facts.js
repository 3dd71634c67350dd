// What became of experts that come from disk: the rows of their facts, live.

import { NONE } from "../../facts.js";
import { formatNumber, formatPercent, tr } from "../../translate.js";
import { formatBytes } from "../bytes.js";

/** Terms and details; empty if all experts are resident. `before` is an earlier reading of /stats, or null. */
export function expertFacts(stats, before) {
  if (!stats?.expert_slots) return [];
  const needed = stats.expert_hits_total + stats.expert_late_total + stats.expert_misses_total;
  return [
    ...(stats.experts_on_gpu ? [[tr("On the GPU"), gpuText(stats, needed)]] : []),
    [tr("Memory limit"), stats.memory_limit_bytes ? formatBytes(stats.memory_limit_bytes) : tr("none")],
    [tr("In memory"), tr("{count} of {total}", { count: stats.experts_in_slots, total: stats.experts_on_disk })],
    [tr("Found there"), needed ? formatPercent(stats.expert_hits_total / needed) : NONE],
    [tr("Waited for disk"), `${formatNumber(stats.expert_stall_s_total, 1)} s`],
    [tr("Read"), readingText(stats, before)],
    [tr("Read ahead"), stats.is_prefetching ? tr("on") : tr("off")],
    ...lenderFacts(stats),
  ];
}

function gpuText(stats, neededElsewhere) {
  const needed = stats.gpu_hits_total + neededElsewhere;
  return tr("{count}, {share} of those needed", { count: stats.experts_on_gpu, share: formatPercent(needed ? stats.gpu_hits_total / needed : 0) });
}

/** Terms and details of the machines that lend memory; empty if there are none. */
function lenderFacts(stats) {
  if (!stats.lenders.length) return [];
  const computed = { pairs: formatNumber(stats.remote_pairs_total), bytes: formatBytes(stats.remote_bytes_total), seconds: formatNumber(stats.remote_wait_s_total, 1) };
  return [
    [tr("Computed elsewhere"), tr("{pairs} pairs, {bytes}, waited {seconds} s", computed)],
    ...stats.lenders.map((lender) => [lender.address, lenderText(lender)]),
  ];
}

function lenderText(lender) {
  return lender.state === "connected" ? tr("{count} experts", { count: lender.num_experts }) : lender.state;
}

function readingText(stats, before) {
  const total = bytesRead(stats);
  const seconds = before ? stats.uptime_s - before.uptime_s : 0;
  if (seconds <= 0) return formatBytes(total);
  return tr("{bytes}, {rate}/s now", { bytes: formatBytes(total), rate: formatBytes((total - bytesRead(before)) / seconds) });
}

function bytesRead(stats) {
  return stats.expert_demand_bytes_total + stats.expert_prefetched_bytes_total;
}

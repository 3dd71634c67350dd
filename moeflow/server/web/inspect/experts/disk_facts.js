// What became of experts that come from disk: the rows of their facts, live.

import { NONE } from "../../facts.js";

const GIB = 2 ** 30;
const MIB = 2 ** 20;

/** 3221225472 -> "3.00 GiB" */
export function formatBytes(bytes) {
  const [unit, name] = bytes >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  return `${(bytes / unit).toLocaleString("en", { maximumSignificantDigits: 3, minimumSignificantDigits: 3, useGrouping: false })} ${name}`;
}

/** Terms and details; empty if all experts are resident. `before` is an earlier reading of /stats, or null. */
export function expertFacts(stats, before) {
  if (!stats?.expert_slots) return [];
  const needed = stats.expert_hits_total + stats.expert_late_total + stats.expert_misses_total;
  return [
    ...(stats.experts_on_gpu ? [["On the GPU", gpuText(stats, needed)]] : []),
    ["Memory limit", stats.memory_limit_bytes ? formatBytes(stats.memory_limit_bytes) : "none"],
    ["In memory", `${stats.experts_in_slots} of ${stats.experts_on_disk}`],
    ["Found there", needed ? `${Math.round((100 * stats.expert_hits_total) / needed)}%` : NONE],
    ["Waited for disk", `${stats.expert_stall_s_total.toFixed(1)} s`],
    ["Read", readingText(stats, before)],
    ["Read ahead", stats.is_prefetching ? "on" : "off"],
    ...lenderFacts(stats),
  ];
}

function gpuText(stats, neededElsewhere) {
  const needed = stats.gpu_hits_total + neededElsewhere;
  return `${stats.experts_on_gpu}, ${needed ? Math.round((100 * stats.gpu_hits_total) / needed) : 0}% of those needed`;
}

/** Terms and details of the machines that lend memory; empty if there are none. */
function lenderFacts(stats) {
  if (!stats.lenders.length) return [];
  const computed = `${stats.remote_pairs_total.toLocaleString("en")} pairs, ${formatBytes(stats.remote_bytes_total)}`;
  return [
    ["Computed elsewhere", `${computed}, waited ${stats.remote_wait_s_total.toFixed(1)} s`],
    ...stats.lenders.map((lender) => [lender.address, lenderText(lender)]),
  ];
}

function lenderText(lender) {
  return lender.state === "connected" ? `${lender.num_experts} experts` : lender.state;
}

function readingText(stats, before) {
  const total = bytesRead(stats);
  const seconds = before ? stats.uptime_s - before.uptime_s : 0;
  const rate = seconds > 0 ? `, ${formatBytes((total - bytesRead(before)) / seconds)}/s now` : "";
  return `${formatBytes(total)}${rate}`;
}

function bytesRead(stats) {
  return stats.expert_demand_bytes_total + stats.expert_prefetched_bytes_total;
}

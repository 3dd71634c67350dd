"""ExpertFlow's traffic through the real engine on this machine: a small GPT-MoE, continuous and static batches.

Rates are the published ones, relative to the rate that continuous batching sustains: the thesis has 105.5 requests/s
at most. So each rate loads the engine as much as there. Both policies have the same kernels and rows of a batch, in
engine processes of their own, and get the same requests. Policies take turns for each repetition.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeflow.bench.serve_run import RunCalls, Sweep, run_engines, with_policy
from moeflow.core.engine_config import EngineConfig
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.poisson import WorkloadSpec
from studies.paper.small_gpt_moe import NUM_LETTERS, write_small_gpt_moe
from studies.paper.thesis import CONTINUOUS, EXPERTFLOW, PUBLISHED, RATES, STATIC, Run, figures

MAX_SEQS: Final = 64
SUSTAINED: Final = PUBLISHED[EXPERTFLOW, max(RATES)].requests_per_s
AT_ONCE: Final = 1e4  # requests/s: all arrive before the first is answered
REPEATS: Final = 3
NUM_STEPS: Final = 1 + 2 * REPEATS * len(RATES)


def measure(
    folder: Path,
    num_requests: int,
    threads: int | None,
    on_run: Callable[[str], None],
    on_requests: Callable[[str, float, Run], None],
) -> dict[str, Any]:
    """Return the fields of a record; the model is written into a folder.

    `on_requests` gets the policy, the published rate and the requests of all repetitions.
    """
    write_small_gpt_moe(folder)
    settings = Settings(model=str(folder), max_num_seqs=MAX_SEQS, prefix_caching=False, num_threads=threads)
    base = resolve(settings).config
    spec = WorkloadSpec(rate=AT_ONCE, num_requests=num_requests, vocab_size=NUM_LETTERS)
    (sustained,) = _run([base], Sweep(spec, (AT_ONCE,), 1), on_run)
    sustained_per_s = sustained["summary"]["requests_per_s"]
    rates = {rate / SUSTAINED * sustained_per_s: rate for rate in RATES}
    configs = [
        with_policy(base, policy, max_prompt=spec.max_prompt, batch_timeout_s=0.0) for policy in (CONTINUOUS, STATIC)
    ]
    found = defaultdict[tuple[str, int], list[Run]](list)
    for fields in _run(configs, Sweep(replace(spec, seed=1), tuple(rates), REPEATS), on_run):
        found[fields["system"], rates[fields["rate"]]].append(fields)
    runs = []
    for (policy, rate), repetitions in found.items():
        together = _together(repetitions)
        on_requests(policy, rate, together["requests"])
        each = [it["summary"] for it in repetitions]
        runs.append(
            {
                "policy": policy,
                "rate": rate,
                "measured_rate": round(repetitions[0]["rate"], 3),
                "each_requests_per_s": [round(it["requests_per_s"], 3) for it in each],
                "each_latency_avg_s": [round(it["latency_avg_s"], 3) for it in each],
                **figures(together),
            }
        )
    return {
        "runs": runs,
        "sustained_per_s": round(sustained_per_s, 3),
        "num_requests": num_requests,
        "max_seqs": MAX_SEQS,
        "weight_format": base.weight_format,
        "threads": base.num_threads,
    }


def _together(repetitions: Sequence[Run]) -> Run:
    """Return repetitions as one run: medians of what they sum up, and all requests."""
    summaries, requests = ([it[name] for it in repetitions] for name in ("summary", "requests"))
    return {
        "summary": {name: statistics.median(it[name] for it in summaries) for name in summaries[0]},
        "requests": {name: [value for it in requests for value in it[name]] for name in requests[0]},
    }


def _run(configs: list[EngineConfig], sweep: Sweep, on_run: Callable[[str], None]) -> list[Run]:
    found: list[Run] = []
    asyncio.run(run_engines(configs, sweep, RunCalls(lambda done, total: None, on_run, found.append)))
    return found

"""ExpertFlow's traffic through the real engine on this machine: a small GPT-MoE, continuous and static batches.

The clock advances by the processor time of each pass, in one thread, so that other programs change little. Both
policies have the same model, kernels and rows of a batch, and get the same requests.

Rates are the published ones, relative to the rate that continuous batching sustains: the thesis has 105.5 requests/s
at most. So each rate loads the engine as much as there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeflow.bench.metrics import Served
from moeflow.bench.serve_run import result, with_policy
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import Runner
from moeflow.engine.runner_loading import load_runner
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.workload.poisson import Arrival, WorkloadSpec, make_arrivals
from studies.paper.small_gpt_moe import NUM_LETTERS, write_small_gpt_moe
from studies.paper.thesis import CONTINUOUS, EXPERTFLOW, PUBLISHED, RATES, STATIC, Run, figures

MAX_SEQS: Final = 32
SUSTAINED: Final = PUBLISHED[EXPERTFLOW, max(RATES)].requests_per_s
AT_ONCE: Final = 1e4  # requests/s: all arrive before the first is answered
NUM_STEPS: Final = 1 + 2 * len(RATES)


def measure(
    folder: Path, num_requests: int, on_run: Callable[[str], None], on_requests: Callable[[str, float, Run], None]
) -> dict[str, Any]:
    """Return the fields of a record; the model is written into a folder.

    `on_requests` gets the policy, the published rate and the requests of each run.
    """
    write_small_gpt_moe(folder)
    settings = Settings(model=str(folder), max_num_seqs=MAX_SEQS, prefix_caching=False, num_threads=1)
    base = resolve(settings).config
    spec = WorkloadSpec(rate=AT_ONCE, num_requests=num_requests, vocab_size=NUM_LETTERS)
    configs = {
        policy: with_policy(base, policy, max_prompt=spec.max_prompt, batch_timeout_s=0.0)
        for policy in (CONTINUOUS, STATIC)
    }
    runs = []
    with closing(load_runner(base, None)) as runner:
        on_run("the sustained rate")
        sustained_per_s = _run(configs[CONTINUOUS], runner, spec)["summary"]["requests_per_s"]
        for rate in RATES:
            of_rate = replace(spec, rate=rate / SUSTAINED * sustained_per_s)
            for policy, config in configs.items():
                on_run(f"{policy}, {of_rate.rate:.1f} requests/s")
                fields = _run(config, runner, of_rate)
                on_requests(policy, rate, fields["requests"])
                runs.append(
                    {"policy": policy, "rate": rate, "measured_rate": round(of_rate.rate, 3), **figures(fields)}
                )
    return {
        "runs": runs,
        "sustained_per_s": round(sustained_per_s, 3),
        "num_requests": num_requests,
        "max_seqs": MAX_SEQS,
        "weight_format": base.weight_format,
        "threads": base.num_threads,
    }


def _run(config: EngineConfig, runner: Runner, spec: WorkloadSpec) -> Run:
    return result(spec, served_by(Engine(config, runner), make_arrivals(spec)))


def served_by(engine: Engine, arrivals: Sequence[Arrival]) -> list[Served]:
    """Return the times of requests, in order of arrival, on a clock of the engine's processor time.

    Raises: EngineError if a request fails.
    """
    now_s, num_sent = 0.0, 0
    firsts: dict[int, float] = {}
    ends: dict[int, float] = {}
    while len(ends) < len(arrivals):
        while num_sent < len(arrivals) and arrivals[num_sent].at_s <= now_s:
            engine.submit(_submission(num_sent, arrivals[num_sent]))
            num_sent += 1
        if not engine.has_work:
            now_s = arrivals[num_sent].at_s
            continue
        began_s = time.process_time()
        outputs = engine.step()
        now_s += time.process_time() - began_s
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
            firsts.setdefault(int(output.request_id), now_s)
            if output.finish_reason is not None:
                ends[int(output.request_id)] = now_s
    return [
        Served(one.at_s, firsts[number], ends[number], len(one.prompt_token_ids), one.num_new)
        for number, one in enumerate(arrivals)
    ]


def _submission(number: int, arrival: Arrival) -> Submission:
    sampling = SamplingParams(max_tokens=arrival.num_new, temperature=0.0, ignore_eos=True)
    return Submission(str(number), arrival.prompt_token_ids, sampling, seed=0)

"""Times a prompt of 4,096 tokens through Qwen3-30B-A3B's layers."""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import decode_graphs
from moeflow.engine.engine import Engine
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.layers import extrapolated, folder_of, free, layer_counts, load, prompt_ids, shape_of
from studies.gpu_check.resident.target import Target


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note the time of a layer, and the share of the device's peak in bfloat16."""
    target = Target(options)
    num_tokens, num_rounds = (24, 2) if target.is_rehearsal else (4096, 4)
    ceilings = target.ceilings()
    times = {}
    for num_layers in layer_counts(target):
        folder = folder_of(target, options.scratch, num_layers)
        with target.models(), mock.patch.object(decode_graphs, "can_capture", return_value=False):
            engine = load(target, folder, max_num_seqs=1, max_tokens=num_tokens + 16)
            rounds = [prompt_s(target, engine, seed, num_tokens) for seed in range(num_rounds)]
            engine.close()
        del engine
        free(target)
        times[num_layers] = statistics.median(rounds[1:])  # the first one compiles kernels
        findings.note(**{f"ms of {num_layers} layers": [round(1e3 * seconds, 3) for seconds in rounds]})
    few, more = layer_counts(target)
    layer_s = (times[more] - times[few]) / (more - few)
    share = shape_of(target).prompt_flops(num_tokens) / max(layer_s, 1e-9) / ceilings.bf16_flops_per_s
    whole_s = extrapolated(times)
    findings.note(layer_ms=round(1e3 * layer_s, 4), share_of_peak=round(share, 4), whole_ms=round(1e3 * whole_s, 2))
    findings.note(peak_tflops=round(ceilings.bf16_flops_per_s / 1e12, 1))
    findings.row(f"{num_tokens} tokens", f"{num_tokens / whole_s:.0f} tokens/s", f"{share:.1%} of bfloat16's peak")


def prompt_s(target: Target, engine: Engine, seed: int, num_tokens: int) -> float:
    """Time a prompt of so many tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit(Submission(str(seed), prompt_ids(target, seed, num_tokens), sampling, seed=seed))
    start = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    return time.perf_counter() - start

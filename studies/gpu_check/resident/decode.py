"""Times decode passes of Qwen3-30B-A3B's layers by moeflow and transformers, beside reading the weights once."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.decode_graphs import GraphForward
from moeflow.engine.engine import Engine
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.layers import (
    WHOLE,
    build,
    extrapolated,
    folder_of,
    layer_counts,
    load,
    prompt_ids,
    shape_of,
)
from studies.gpu_check.resident.target import Target

PROMPT_LEN = 16
WARM_PASSES = 3  # not counted
GRAPHS, EAGER, INT4 = "moeflow, graphs", "moeflow, eager", "moeflow, int4"
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # of experts in transformers
Arm = Callable[[int], float]  # from a batch size to the seconds of a pass
Times = dict[str, dict[int, dict[int, list[float]]]]  # of an arm, a batch and a number of layers: one for each round


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note medians and spreads of each arm, whose rounds take turns."""
    target = Target(options)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each length
    batches, num_rounds = ((2,), 1) if target.is_rehearsal else ((1, 16, 64), 3)
    times: Times = {}
    ceilings = target.ceilings()
    findings.note(read_gb_per_s=round(ceilings.read_bytes_per_s / 1e9, 1))
    arms = {}
    for num_layers in layer_counts(target):
        model = build(target, num_layers)
        folder = folder_of(target, options.scratch, num_layers, model)
        arms[num_layers] = dict(_transformers_arms(target, model))
        arms[num_layers] |= _moeflow_arms(target, folder, batches[-1], findings)
    for _ in range(num_rounds):
        for (num_layers, of_layers), batch in itertools.product(arms.items(), batches):
            for name, arm in of_layers.items():
                with findings.of(f"{name}, batch {batch}"):
                    seconds = arm(batch)
                    of_batch = times.setdefault(name, {}).setdefault(batch, {})
                    of_batch.setdefault(num_layers, []).append(seconds)
        findings.note(ms=_in_ms(times))
    _compare(findings, target, times, ceilings.read_bytes_per_s)


def num_passes(target: Target) -> int:
    """Return how many passes of an arm follow each other."""
    return WARM_PASSES + (1 if target.is_rehearsal else 11)


def _in_ms(times: Times) -> dict[str, Any]:
    return {
        f"{name}, batch {batch}, {num_layers} layers": [round(1e3 * seconds, 4) for seconds in rounds]
        for name, of_arm in times.items()
        for batch, of_batch in of_arm.items()
        for num_layers, rounds in of_batch.items()
    }


def _compare(findings: Findings, target: Target, times: Times, read_bytes_per_s: float) -> None:
    """Note what 48 layers would take, of the floor and beside moeflow's graphs."""
    shape = shape_of(target)
    floors: dict[int, float] = {}
    whole: dict[str, dict[int, float]] = {}
    for name, of_arm in times.items():
        for batch, of_batch in of_arm.items():
            if len(of_batch) < 2:
                continue
            layer_bytes = shape.read_bytes(batch, PROMPT_LEN + num_passes(target))
            floors[batch] = (WHOLE * layer_bytes + shape.logit_bytes) / read_bytes_per_s
            seconds = extrapolated({layers: statistics.median(rounds) for layers, rounds in of_batch.items()})
            whole.setdefault(name, {})[batch] = seconds
            rounds = of_batch[max(of_batch)]
            spread = (max(rounds) - min(rounds)) / statistics.median(rounds)
            beside = f"{floors[batch] / seconds:.1%} of bfloat16's floor, spread {spread:.0%}"
            findings.row(f"{name}, batch {batch}", f"{1e3 * seconds:.2f} ms", beside)
    findings.note(
        whole_ms={name: {batch: round(1e3 * it, 4) for batch, it in of_arm.items()} for name, of_arm in whole.items()},
        floor_ms={batch: round(1e3 * seconds, 4) for batch, seconds in floors.items()},
    )
    for batch in floors:
        others = [whole[name][batch] for name in whole if "moeflow" not in name and batch in whole[name]]
        if others and batch in whole.get(GRAPHS, {}):
            ratio = min(others) / whole[GRAPHS][batch]
            findings.row(f"transformers over moeflow, batch {batch}", f"{ratio:.2f}", "times as long")
        if batch in whole.get(GRAPHS, {}) and batch in whole.get(INT4, {}):
            ratio = whole[GRAPHS][batch] / whole[INT4][batch]
            findings.row(f"bfloat16 over int4, batch {batch}", f"{ratio:.2f}", "times as long")


def _transformers_arms(target: Target, model: PreTrainedModel) -> Iterator[tuple[str, Arm]]:
    for implementation in IMPLEMENTATIONS:
        yield f"transformers, {implementation}", partial(_transformers_pass_s, target, model, implementation)


@torch.no_grad()
def _transformers_pass_s(target: Target, model: PreTrainedModel, implementation: str, batch: int) -> float:
    """Time decode passes. Prompts use grouped_mm: batched_mm would gather weights for each of their tokens."""
    model.set_experts_implementation("grouped_mm")
    prompts = [prompt_ids(target, number, PROMPT_LEN) for number in range(batch)]
    out = model(torch.tensor(prompts, device=target.device), use_cache=True)
    model.set_experts_implementation(implementation)
    times = []
    for _ in range(num_passes(target)):
        tokens = out.logits[:, -1:].argmax(-1)
        target.wait()
        start = time.perf_counter()
        out = model(tokens, past_key_values=out.past_key_values, use_cache=True)
        target.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_PASSES:])


def _moeflow_arms(target: Target, folder: Path, largest_batch: int, findings: Findings) -> dict[str, Arm]:
    """Return the arms of an engine, whose passes are eager without a captured size, and of one with int4 weights."""
    # The device in software exists in the main thread alone, and threads quantize.
    formats = {GRAPHS: None, INT4: None if target.is_rehearsal else "int4"}
    max_tokens = 64 if target.is_rehearsal else 1024
    arms: dict[str, Arm] = {}
    for name, quantize in formats.items():
        try:
            with target.models():
                engine = load(target, folder, max_num_seqs=largest_batch, max_tokens=max_tokens, quantize=quantize)
        except Exception as error:  # the other arms are timed nonetheless
            findings.fault(f"{name}: {type(error).__name__}: {error}"[:500])
            continue
        arms[name] = partial(decode_pass_s, target, engine)
        if name == GRAPHS:
            eager = mock.patch.object(GraphForward, "_size_for", return_value=None)
            arms[EAGER] = partial(decode_pass_s, target, engine, patch=eager)
    return arms


def decode_pass_s(
    target: Target, engine: Engine, batch: int, *, patch: AbstractContextManager[Any] | None = None
) -> float:
    """Time the decode passes of so many sequences, with a patch in place."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_passes(target) + 1, ignore_eos=True)
    times = []
    with target.models(), patch or nullcontext():
        for number in range(batch):
            engine.submit(Submission(str(number), prompt_ids(target, number, PROMPT_LEN), sampling, seed=number))
        while engine.has_work:
            start = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == batch:  # all decode
                times.append(time.perf_counter() - start)
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
    return statistics.median(times[WARM_PASSES:])

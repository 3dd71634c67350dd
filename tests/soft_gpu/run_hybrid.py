"""Runs tiny models on the CPU and hybrid on the GPU in software, and prints what came of it as JSON.

python -m tests.soft_gpu.run_hybrid FAMILY...
python -m tests.soft_gpu.run_hybrid integers
python -m tests.soft_gpu.run_hybrid disk
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core import hybrid_config  # noqa: E402
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig  # noqa: E402
from moeflow.core.hybrid_config import HybridConfig  # noqa: E402
from moeflow.core.plan import HYBRID, plan_from_json, plan_to_json  # noqa: E402
from moeflow.core.units import MIB  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.experts.hybrid.popularity import Move, Popularity  # noqa: E402
from moeflow.kernels.cpu import extension  # noqa: E402
from moeflow.planner.apply_plan import apply_plan  # noqa: E402
from moeflow.planner.hardware.host import host_resources  # noqa: E402
from moeflow.planner.resolve import resolve  # noqa: E402
from moeflow.settings.settings import Settings  # noqa: E402
from studies.small_families import Answers, greedy_passes, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402

INTEGERS, DISK = "integers", "disk"
NUM_TOKENS = 6
NUM_EXPERTS = 8
SLOTS = (0, 1, 4, 8)
BATCHES = (1, 16)
STREAM_TOKENS = 40  # prompts of 96 tokens a pass are streamed, decode passes never
SET_BYTES = 300_000  # up to three experts


def main(families: list[str]) -> None:
    """Print one object for each family, or for each format of integers."""
    with tempfile.TemporaryDirectory() as folder:
        if families == [INTEGERS]:
            print(json.dumps(_compare_integers(Path(folder))))
        elif families == [DISK]:
            print(json.dumps(_compare_disk(Path(folder))))
        else:
            print(json.dumps({family: _compare(family, Path(folder, family)) for family in families}))


def _compare(family: str, folder: Path) -> dict[str, Any]:
    """Return for each batch and number of slots whether tokens are the CPU's, and counts."""
    write_small(family, folder, initializer_range=0.1)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        lengths = [(5, 1, 33, 14)[number % 4] for number in range(batch)]
        expected, _ = _run(small_config(folder, "cpu", "float32", max_num_seqs=batch), lengths)
        for num_slots in SLOTS:
            config = replace(
                small_config(folder, device.NAME, "float32", max_num_seqs=batch), hybrid=_hybrid(num_slots)
            )
            with device.soft_gpu(), kernels.soft_kernels(), _restless():
                got, counts = _run(config, lengths)
            found[f"{batch} x {num_slots}"] = {"is_equal": got == expected, **counts}
    return found


def _compare_integers(folder: Path) -> dict[str, Any]:
    """Return for each format of integers and number of slots whether tokens are those of a GPU that has all experts."""
    write_small("qwen3_moe", folder, initializer_range=0.1)
    found: dict[str, Any] = {}
    lengths = [5, 60]
    for weight_format in ("int8", "int4"):
        settings = Settings(
            model=str(folder), device=device.NAME, quantize=weight_format, max_model_len=112, kv_cache_bytes=8 << 20
        )
        resident = replace(resolve(settings).config, dtype="float32", kv_dtype="float32")
        with device.soft_gpu(), kernels.soft_kernels(), _restless():
            expected, _ = _run(resident, lengths)
            for num_slots in (0, 4, NUM_EXPERTS):
                # Activations of 16 bits are nearly those of the GPU.
                config = replace(resident, hybrid=_hybrid(num_slots, weight_format), is_wide=True)
                found[f"{weight_format}, {num_slots} slots"] = _run(config, lengths)[0] == expected
    return found


def _compare_disk(folder: Path) -> dict[str, Any]:
    """Return for families with experts in memory or on disk whether tokens are the same, and counts of the latter."""
    found: dict[str, Any] = {}
    for family, weight_format, batch in (("qwen2_moe", "int4", 16), ("gpt_oss", "float32", 1)):
        write_small(family, folder / family, initializer_range=0.1)
        lengths = [(5, 60)[number % 2] for number in range(batch)]
        config = small_config(folder / family, device.NAME, "float32")
        in_memory = replace(config, hybrid=_hybrid(3, weight_format), is_wide=True)
        slots = ExpertSlotsConfig(packed_weights_file=str(folder / f"{family}.slabs"), num_slots=4, slab_bytes=0)
        with device.soft_gpu(), kernels.soft_kernels():
            with _restless():
                expected, _ = _run(in_memory, lengths)
            with _restless():
                got, counts = _run(replace(in_memory, experts=slots), lengths)
        found[family] = {"is_equal": got == expected, **counts}
    found["planned"] = _run_plan(folder / "planned")
    return found


def _run_plan(folder: Path) -> dict[str, Any]:
    """Return whether a plan for little memory of both kinds runs as printed, and counts."""
    write_small("qwen3_moe", folder, initializer_range=0.1, num_hidden_layers=12)
    cpu = small_config(folder, "cpu", "float32")
    settings = Settings(
        **{"model": str(folder), "device": device.NAME, "dtype": "float32", "cache_dir": folder},
        **{"kv_cache_bytes": 8 * MIB, "max_model_len": 112, "max_num_seqs": 4, "max_num_batched_tokens": 96},
    )
    here = host_resources()
    for free_bytes in range(620 * MIB, 520 * MIB, -MIB):  # until it is too small for the model
        large = replace(here, accelerator=device.NAME, accelerator_free_bytes=free_bytes, next_free_bytes=())
        plan = resolve(settings, resources=large).plan
        if plan.pipeline == HYBRID and plan.config.hybrid.num_gpu_experts < NUM_EXPERTS // 2:
            break
    little = replace(settings, memory_bytes=plan.memory_bytes - 4 * MIB)
    plan = plan_from_json(plan_to_json(resolve(little, resources=large).plan), "plan")
    config, lengths = apply_plan(plan, {}, resources=large).config, [5, 60]
    expected, _ = _run(cpu, lengths)
    with device.soft_gpu(), kernels.soft_kernels(), _restless():
        got, counts = _run(config, lengths)
    return {"is_equal": got == expected, "pipeline": plan.pipeline, **counts}


def _hybrid(num_slots: int, weight_format: str = "float32") -> HybridConfig:
    return HybridConfig(
        num_gpu_experts=num_slots,
        cpu_weight_format=weight_format,
        cpu_isa=extension.best_isa(""),
        stream_tokens=STREAM_TOKENS,
    )


def _run(config: EngineConfig, lengths: list[int]) -> tuple[Answers, dict[str, Any]]:
    """Return the tokens of greedy answers, and the counts of the last pass that continues all of them."""
    engine = Engine.load(config)
    answers: Answers = {str(number): [] for number in range(len(lengths))}
    counts: dict[str, Any] = {}
    device.COUNTS.clear()
    for outputs in greedy_passes(engine, prompts_of(lengths), NUM_TOKENS):
        for output in outputs:
            answers[output.request_id] += output.token_ids
        if len(outputs) == len(lengths):
            counts = device.COUNTS.report()
        device.COUNTS.clear()
    stats = engine.stats()
    engine.close()
    return answers, {
        **counts,
        "num_moves": stats.expert_moves_total,
        "num_streamed": stats.streamed_passes_total,
        "pairs": [stats.gpu_pairs_total, stats.cpu_pairs_total],
        "in_memory": [stats.expert_hits_total, stats.expert_misses_total, stats.experts_in_slots],
    }


@contextmanager
def _restless() -> Iterator[None]:
    """Move experts before every second pass, whatever their popularity, and stream few experts at once."""
    random, turns = np.random.default_rng(0), itertools.cycle((True, False))

    def moves(popularity: Popularity, is_on_gpu: NDArray[np.bool_], at_most: int) -> list[Move]:
        found: list[Move] = []
        if next(turns):
            return found
        for layer in random.permutation(len(is_on_gpu)).tolist()[:at_most]:
            on_gpu, on_cpu = np.flatnonzero(is_on_gpu[layer]), np.flatnonzero(~is_on_gpu[layer])
            if len(on_gpu) and len(on_cpu):
                found.append(Move(layer, int(random.choice(on_gpu)), int(random.choice(on_cpu))))
        return found

    with mock.patch.object(Popularity, "moves", moves), mock.patch.object(hybrid_config, "_SET_BYTES", SET_BYTES):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])

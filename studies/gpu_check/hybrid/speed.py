"""Times Qwen3-30B-A3B's layers with a quarter of the experts on the GPU, beside streaming them and the CPU alone."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from studies.gpu_check.findings import Findings
from studies.gpu_check.hybrid.configs import hybrid
from studies.gpu_check.resident.decode import decode_pass_s
from studies.gpu_check.resident.layers import extrapolated, folder_of, free, layer_counts, settings_for, shape_of
from studies.gpu_check.resident.prompt import prompt_s
from studies.gpu_check.resident.target import Target

HYBRID: Final = "hybrid"
STREAMING: Final = "streaming"  # all experts that are not on the GPU, in each pass
CPU: Final = "CPU alone"
Times = dict[str, dict[str, dict[int, float]]]  # of a way and a task, for each number of layers


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note the seconds of decode passes and of a prompt, for the whole model."""
    target = Target(options)
    times: Times = {}
    for num_layers in layer_counts(target):
        folder = folder_of(target, options.scratch, num_layers)
        for way in (HYBRID, STREAMING, CPU):
            with findings.of(f"{way}, {num_layers} layers"):
                found, share = _measured(target, folder, way)
                for task, seconds in found.items():
                    times.setdefault(task, {}).setdefault(way, {})[num_layers] = seconds
                findings.note(**{f"{way}, {num_layers} layers, share of choices on the GPU": round(share, 3)})
                findings.note(seconds=times)
            free(target)
    for task, of_ways in times.items():
        whole = {way: extrapolated(of_layers) for way, of_layers in of_ways.items() if len(of_layers) == 2}
        for way, seconds in whole.items():
            ratio = f"{seconds / max(whole[HYBRID], 1e-9):.2f}" if HYBRID in whole else "?"
            findings.row(f"{way}, {task}", f"{1e3 * seconds:.2f} ms", f"hybrid is {ratio} times as fast")


def _measured(target: Target, folder: Path, way: str) -> tuple[Mapping[str, float], float]:
    """Return the seconds of each task, and the share of choices on the GPU."""
    with target.models(), closing(_engine(target, folder, way)) as engine:
        return _timed(target, engine), engine.stats().gpu_share


def _engine(target: Target, folder: Path, way: str) -> Engine:
    tokens = 64 if target.is_rehearsal else 1024
    device = "cpu" if way == CPU else target.engine_device
    config = resolve(settings_for(target, str(folder), device=device, max_num_seqs=16, max_tokens=tokens)).config
    if way == CPU:
        return Engine.load(config)
    stream_tokens = 1 if way == STREAMING else _prompt_len(target)
    return Engine.load(hybrid(config, shape_of(target).num_experts // 4, stream_tokens))


def _timed(target: Target, engine: Engine) -> Mapping[str, float]:
    """Return the seconds of each task."""
    batches = (2,) if target.is_rehearsal else (1, 16)
    found = {f"decode, batch {batch}": decode_pass_s(target, engine, batch) for batch in batches}
    length = _prompt_len(target)
    rounds = [prompt_s(target, engine, 100 + number, length) for number in range(3)]
    return found | {f"prompt of {length} tokens": statistics.median(rounds[1:])}


def _prompt_len(target: Target) -> int:
    return 24 if target.is_rehearsal else 512

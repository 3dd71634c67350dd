"""The command line, and the steps that it names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SOFTWARE: Final = "softgpu"  # the device of the rehearsal
PIPELINES: Final = "pipelines"
# Each group's steps, with their most seconds; pipelines share the remaining time.
STEPS: Final[Mapping[str, Mapping[str, float]]] = {
    "resident": {
        "kernels": 80.0,
        "families": 110.0,
        "decode": 120.0,
        "attention": 40.0,
        "experts": 60.0,
        "prompt": 50.0,
        "loading": 50.0,
    },
    "hybrid": {"seam": 40.0, "tokens": 90.0, "speed": 170.0},
    PIPELINES: {"speeds": 60.0, "tokens": 180.0, "overlap": 60.0, "hollow": 90.0},
}
_SMALL_PIPELINES: Final = ("tokens", "overlap")  # the others measure, or write a large model
_DEVICES: Final = {"resident": "cuda", "hybrid": "cuda", PIPELINES: "cuda:0:{memory}"}
_TIME_LIMITS_S: Final = {"resident": 480.0, "hybrid": 300.0, PIPELINES: 570.0}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("gpu-check", description="Check moeflow on a GPU and write one JSON file.")
    parser.add_argument("group", nargs="?", choices=list(STEPS), default="resident", help="steps to run")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps of the group")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="file to write")
    parser.add_argument("--device", help=f"as --device of moeflow; {SOFTWARE} rehearses; {{memory}} is put in")
    parser.add_argument("--memory", nargs="+", default=["16GiB", "24GiB"], help="of the GPU, for the benchmark")
    parser.add_argument("--shape", default="mixtral-8x7b", help="of the benchmark's model: shipped, or a config.json")
    parser.add_argument("--middle", type=int, default=1, help="divides the widths of the model that overlap is seen on")
    parser.add_argument("--requests", type=int, default=512, help="decoded concurrently in the benchmark")
    parser.add_argument("--micro-batch", type=int, default=64, help="of these, computed at once")
    parser.add_argument("--time-limit", type=float, help="seconds for everything")
    parser.add_argument("--scratch", type=Path, help="folder for models, which take up to 13 GB there")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.device = options.device or _DEVICES[options.group]
    options.time_limit = options.time_limit or _TIME_LIMITS_S[options.group]
    unknown = set(options.only or ()) - {step.partition(" ")[0] for step in _all_steps(options)}
    if unknown:
        parser.error(f"{options.group} has no step {', '.join(sorted(unknown))}")
    return options


def steps_of(options: argparse.Namespace) -> list[str]:
    """Return the chosen steps, in order."""
    return [step for step in _all_steps(options) if not options.only or step.partition(" ")[0] in options.only]


def _all_steps(options: argparse.Namespace) -> list[str]:
    if options.group != PIPELINES:
        return [*STEPS[options.group]]
    if is_rehearsal(options):
        return [*_SMALL_PIPELINES]
    return [*STEPS[options.group], *(f"{PIPELINES} {memory}" for memory in options.memory)]


def is_rehearsal(options: argparse.Namespace) -> bool:
    """Return whether the device is the GPU in software."""
    return bool(options.device == SOFTWARE)

"""The command line, and the steps that it names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

SOFTWARE: Final = "softgpu"  # the device of the rehearsal
PIPELINES: Final = "pipelines"
ALL: Final = "all"
# Each group's steps, with their most seconds: the most important first.
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
    PIPELINES: {"overlap": 45.0, "tokens": 60.0, "hollow": 25.0, PIPELINES: 75.0, "speeds": 20.0},
}
# The steps of all groups in a slot that is too short for them: what nothing else can show comes first.
_BY_VALUE: Final = (
    ("resident", "kernels"),
    ("resident", "families"),
    ("hybrid", "seam"),
    ("hybrid", "speed"),
    (PIPELINES, "overlap"),
    ("hybrid", "tokens"),
    ("resident", "decode"),
    (PIPELINES, "tokens"),
    (PIPELINES, "hollow"),
    (PIPELINES, PIPELINES),
    ("resident", "experts"),
    ("resident", "attention"),
    ("resident", "prompt"),
    ("resident", "loading"),
    (PIPELINES, "speeds"),
)
_SMALL_PIPELINES: Final = ("overlap", "tokens")  # the others measure, or write a large model
_DEVICES: Final = {"resident": "cuda", "hybrid": "cuda", PIPELINES: "cuda:0:{memory}"}
_TIME_LIMITS_S: Final = {"resident": 480.0, "hybrid": 300.0, PIPELINES: 300.0, ALL: 840.0}


class Step(NamedTuple):
    """A step of a group."""

    group: str
    name: str
    memory: str  # of the GPU, for a benchmark; empty: it needs none
    limit_s: float

    @property
    def title(self) -> str:
        """How the command line names it within its group."""
        return f"{self.name} {self.memory}".strip()

    def device(self, options: argparse.Namespace) -> str:
        """Return the device that it runs on, as --device of moeflow."""
        return options.device or _DEVICES[self.group]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("gpu-check", description="Check moeflow on a GPU and write one JSON file.")
    parser.add_argument("group", nargs="?", choices=[*STEPS, ALL], default="resident", help="steps to run")
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
    options.time_limit = options.time_limit or _TIME_LIMITS_S[options.group]
    if options.step:
        options.device = options.device or _DEVICES[options.group]
    unknown = set(options.only or ()) - {step.name for step in _all_steps(options)}
    if unknown:
        parser.error(f"{options.group} has no step {', '.join(sorted(unknown))}")
    return options


def steps_of(options: argparse.Namespace) -> list[Step]:
    """Return the chosen steps, in order."""
    return [step for step in _all_steps(options) if not options.only or step.name in options.only]


def _all_steps(options: argparse.Namespace) -> list[Step]:
    group = options.group
    pairs = _BY_VALUE if group == ALL else [(group, name) for name in STEPS[group]]
    if is_rehearsal(options):
        pairs = [(group, name) for group, name in pairs if group != PIPELINES or name in _SMALL_PIPELINES]
    return [
        Step(group, name, memory, STEPS[group][name])
        for group, name in pairs
        for memory in (options.memory if name == PIPELINES else [""])
    ]


def is_rehearsal(options: argparse.Namespace) -> bool:
    """Return whether the device is the GPU in software."""
    return bool(options.device == SOFTWARE)

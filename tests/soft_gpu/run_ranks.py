"""Runs tiny models on two GPUs in software that share them, and on one, and prints what came of it as JSON.

python -m tests.soft_gpu.run_ranks FAMILY...: each with experts in slices and whole, and by a pipeline.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.engine.ranks import rank_processes  # noqa: E402
from studies.small_families import Answers, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device  # noqa: E402
from tests.soft_gpu.offloading import EMULATED, on_soft_gpu, soft_offloading  # noqa: E402
from tests.soft_gpu.run_families import run  # noqa: E402

LAYOUTS = (("sliced", "tensor"), ("expert", "replicated"))
DENSE = {"llama": [("auto", "tensor")]}
PIPELINE = "cgopipe"
NO_PIPELINE = ("olmoe",)  # its norms run over all heads


def main(families: list[str]) -> None:
    """Print one object for each family."""
    with tempfile.TemporaryDirectory() as folder, soft_offloading():
        print(json.dumps({family: _compare(family, Path(folder, family)) for family in families}))


def _compare(family: str, folder: Path) -> dict[str, Any]:
    """Return whether two devices give the same tokens as one in each layout."""
    write_small(family, folder, initializer_range=0.1)  # so large that tokens depend on stored states
    prompts = prompts_of([5, 1, 33])
    expected, _ = run(small_config(folder, device.NAME, "float32"), prompts)
    found: dict[str, Any] = {}
    for experts, attention in DENSE.get(family, LAYOUTS):
        config = small_config(
            folder, device.NAME, "float32", num_ranks=2, expert_layout=experts, attention_layout=attention
        )
        found[f"{experts}/{attention}"] = _shared(config, prompts, expected)
    if family not in NO_PIPELINE:
        more = {"pipeline": PIPELINE, "micro_batch": 2, "num_ranks": 2}
        config = on_soft_gpu(small_config(folder, EMULATED, "float32", **more))
        found[PIPELINE] = _shared(config, prompts, expected)
    return found


def _shared(config: EngineConfig, prompts: list[list[int]], expected: Answers) -> dict[str, Any]:
    with mock.patch.object(rank_processes, "start_rank", _start_rank):
        got, counts = run(config, prompts)
    return {"is_equal": got == expected, **counts}


def _start_rank(_: str, descriptors: list[int], rank: int) -> subprocess.Popen[bytes]:
    """Start a rank with a GPU in software."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.soft_gpu.rank", *map(str, [*descriptors, rank])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=descriptors,
    )


if __name__ == "__main__":
    main(sys.argv[1:])

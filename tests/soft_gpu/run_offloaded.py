"""Runs a tiny model by pipelines on the processor and on the GPU in software, and prints what came of it as JSON.

python -m tests.soft_gpu.run_offloaded PIPELINE...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from studies.small_families import Answers, greedy_passes, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device  # noqa: E402
from tests.soft_gpu.offloading import EMULATED, on_soft_gpu, soft_offloading  # noqa: E402

NUM_TOKENS = 6
LENGTHS = (5, 1, 33, 14, 60)
MICRO_BATCH = 2


def main(pipelines: list[str]) -> None:
    """Print one object for each pipeline."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small("mixtral", folder, initializer_range=0.1)
        plain, _ = _run(small_config(folder, "cpu", "float32"))
        print(json.dumps({pipeline: _compare(folder, pipeline, plain) for pipeline in pipelines}))


def _compare(folder: Path, pipeline: str, plain: Answers) -> dict[str, Any]:
    """Return whether the tokens are those of the plain run, and the counts of the last decode pass."""
    sizes = {"micro_batch": MICRO_BATCH, "prompt_micro_batch": MICRO_BATCH}
    more = {"pipeline": pipeline, "resident_experts": 0.4, **sizes}
    config = on_soft_gpu(small_config(folder, EMULATED, "float32", **more))
    with soft_offloading():
        found, counts = _run(config)
    return {"is_equal": found == plain, **counts}


def _run(config: EngineConfig) -> tuple[Answers, dict[str, Any]]:
    engine = Engine.load(config)
    answers: Answers = {str(number): [] for number in range(len(LENGTHS))}
    counts: dict[str, Any] = {}
    try:
        for outputs in greedy_passes(engine, prompts_of(LENGTHS), NUM_TOKENS):
            for output in outputs:
                answers[output.request_id] += output.token_ids
            counts = device.COUNTS.report()
            device.COUNTS.clear()
    finally:
        engine.close()
    return answers, counts


if __name__ == "__main__":
    main(sys.argv[1:])

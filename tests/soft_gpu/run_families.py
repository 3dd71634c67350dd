"""Runs tiny models of families on the processor and on the GPU in software, and prints what came of it as JSON.

python -m tests.soft_gpu.run_families FAMILY...
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from studies.small_families import Answers, greedy_passes, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402
from tests.soft_gpu.multimodal import write_multimodal  # noqa: E402

NUM_TOKENS = 6
NUM_TURNS = 2  # of a conversation: the second one finds the prefix of the first
BATCHES = (1, 16)
MULTIMODAL = "gemma4"  # only its text model is loaded


def main(families: list[str]) -> None:
    """Print one object for each family."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({family: _compare(family, Path(folder, family)) for family in families}))


def _compare(family: str, folder: Path) -> dict[str, Any]:
    """Return whether both give the same tokens, and the counts of loading and the last decode pass for each batch."""
    write = write_multimodal if family == MULTIMODAL else partial(write_small, family)
    write(folder, initializer_range=0.1)  # so large that tokens depend on stored states
    found: dict[str, Any] = {}
    for batch in BATCHES:
        prompts = prompts_of([(5, 1, 33, 14)[number % 4] for number in range(batch)])
        expected, _ = run(small_config(folder, "cpu", "float32", max_num_seqs=batch), prompts)
        config = small_config(folder, device.NAME, "float32", max_num_seqs=batch)
        with device.soft_gpu(), kernels.soft_kernels():
            got, counts = run(config, prompts)
        found[str(batch)] = {"is_equal": got == expected, **counts}
    return found


def run(config: EngineConfig, prompts: list[list[int]], num_turns: int = NUM_TURNS) -> tuple[Answers, dict[str, Any]]:
    """Return the tokens of greedy answers, the counts of loading, and those of the last pass that continues all."""
    device.COUNTS.clear()
    engine = Engine.load(config)
    loading = device.COUNTS.report()
    answers: Answers = {str(number): [] for number in range(len(prompts))}
    counts: dict[str, Any] = {}
    num_cached: dict[str, int] = {}
    num_chunked = 0
    for _ in range(num_turns):
        device.COUNTS.clear()
        for outputs in greedy_passes(engine, prompts, NUM_TOKENS):
            for output in outputs:
                answers[output.request_id] += output.token_ids
                num_cached[output.request_id] = output.num_cached_tokens
            if len(outputs) == len(prompts):
                counts = device.COUNTS.report()
            num_chunked += device.COUNTS.launches["carry_kernel"]
            device.COUNTS.clear()
        prompts = [prompt + answers[str(number)][-NUM_TOKENS:] for number, prompt in enumerate(prompts)]
    engine.close()
    return answers, {"num_cached": sum(num_cached.values()), "num_chunked": num_chunked, "loading": loading, **counts}


if __name__ == "__main__":
    main(sys.argv[1:])

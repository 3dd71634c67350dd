"""Observes tiny models on the CPU and on the GPU in software, with and without graphs, and prints what differs as JSON.

python -m tests.soft_gpu.run_observed FAMILY...
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.engine_config import EngineConfig  # noqa: E402
from moeflow.core.hybrid_config import HybridConfig  # noqa: E402
from moeflow.core.observation import TIERS, ExpertQuestion, ExpertSight, TokenQuestion, Watch  # noqa: E402
from moeflow.engine import decode_graphs  # noqa: E402
from moeflow.engine.engine import Engine  # noqa: E402
from moeflow.kernels.cpu import extension  # noqa: E402
from studies.small_families import greedy_passes, prompts_of, small_config, write_small  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402

NUM_TOKENS = 6
LENGTHS = (5, 1, 33)
NUM_SLOTS = 3


def main(families: list[str]) -> None:
    """Print one object for each family."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({family: _compare(family, Path(folder, family)) for family in families}))


def _compare(family: str, folder: Path) -> dict[str, Any]:
    """Return for each way whether tokens have the CPU's experts, sums and places of experts, and launches."""
    write_small(family, folder, initializer_range=0.1)
    expected = _seen(small_config(folder, "cpu", "float32", max_num_seqs=len(LENGTHS)))
    on_gpu = small_config(folder, device.NAME, "float32", max_num_seqs=len(LENGTHS))
    shared = HybridConfig(
        num_gpu_experts=NUM_SLOTS, cpu_weight_format="float32", cpu_isa=extension.best_isa(""), stream_tokens=0
    )
    hybrid = replace(on_gpu, hybrid=shared)
    found: dict[str, Any] = {}
    for name, config, has_graphs in (("graphs", on_gpu, True), ("eager", on_gpu, False), ("hybrid", hybrid, True)):
        without = nullcontext() if has_graphs else mock.patch.object(decode_graphs, "can_capture", return_value=False)
        with device.soft_gpu(), kernels.soft_kernels(), without:
            seen = _seen(config)
        found[name] = {**seen, **{key: seen[key] == expected[key] for key in ("tokens", "experts")}}
    return found


def _seen(config: EngineConfig) -> dict[str, Any]:
    """Return the tokens, their experts, whether sums agree, and the launches of a decode pass, closed and observed."""
    with closing(Engine.load(config)) as engine:
        closed = _launches(engine)
        engine.look(Watch())
        tokens: dict[str, list[int]] = {}
        for outputs in greedy_passes(engine, prompts_of(LENGTHS), NUM_TOKENS):
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        answers = [engine.look(TokenQuestion(name)) for name in sorted(tokens)]
        sight = engine.look(ExpertQuestion())
        assert isinstance(sight, ExpertSight)
        observed = _launches(engine)
        return {
            "tokens": tokens,
            "experts": [one.experts.hex() for answer in answers for one in answer.sequences],  # type: ignore[union-attr]
            "is_whole": _is_whole(sight),
            "not_counted": sight.not_counted,
            "places": {name: sight.residency.count(place) for place, name in enumerate(TIERS)},
            "launches": (closed, observed),
        }


def _launches(engine: Engine) -> int:
    """Return how many kernels the last decode pass of some requests starts."""
    number = 0
    for _ in greedy_passes(engine, prompts_of((4, 3)), 4):
        number = sum(device.COUNTS.launches.values())
        device.COUNTS.clear()
    return number


def _is_whole(sight: ExpertSight) -> bool:
    """Return whether each layer's counts add up to the tokens of all passes times the experts of each."""
    counts = memoryview(sight.total.counts).cast("q").tolist()
    size = sight.num_experts
    sums = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    return sums == [sight.top_k * sight.total.tokens] * len(sight.layers) and sight.total.tokens > 0


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs tiny models with packed weights on the GPU in software, and their floats on the processor, and prints JSON.

python -m tests.soft_gpu.run_files CASE...
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from tests.soft_gpu import machine

machine.prepare()

from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig  # noqa: E402
from moeflow.core.hybrid_config import HybridConfig  # noqa: E402
from moeflow.kernels import packed_bands  # noqa: E402
from moeflow.kernels.cpu import extension  # noqa: E402
from moeflow.planner.resolve import resolve  # noqa: E402
from moeflow.settings.settings import Settings  # noqa: E402
from studies.small_families import small_config  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402
from tests.soft_gpu.packed_files import CASES  # noqa: E402
from tests.soft_gpu.run_families import run  # noqa: E402

DENSE: Final = ("llama q4_k_m",)
FROM_DISK: Final = ("gpt_oss mxfp4", "q4_k_m")  # biases, and layers of several formats
PROMPTS: Final = [[5, 9, 70, 31, 7], [40], list(range(20, 53))]  # of a vocabulary of 80


def main(cases: list[str]) -> None:
    """Print one object for each case."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({case: _compare(case, Path(folder, str(number))) for number, case in enumerate(cases)}))


def _compare(case: str, folder: Path) -> dict[str, Any]:
    """Return the formats that the planner chooses, whether tokens are equal, and launches of decode passes."""
    packed, plain = CASES[case](folder)
    planned = small_config(packed, device.NAME, "auto", max_num_seqs=len(PROMPTS))
    exact = replace(planned, dtype="float32", kv_dtype="float32", router_format="float32")
    expected, _ = run(small_config(plain, "cpu", "float32"), PROMPTS, num_turns=1)
    is_shared = case not in DENSE and _can_move_experts(planned)
    with device.soft_gpu(), kernels.soft_kernels():
        got, _ = run(exact, PROMPTS, num_turns=1)
        _, counts = run(planned, PROMPTS[:1], num_turns=1)
        slots = ExpertSlotsConfig(packed_weights_file=str(folder / "packed.slabs"), num_slots=4, slab_bytes=0)
        shared = [_hybrid(exact)] * is_shared
        if case in FROM_DISK:
            shared.append(replace(shared[0], experts=slots))
        hybrid = [run(config, PROMPTS, num_turns=1)[0] for config in shared]
    reasons = resolve(Settings(model=str(packed), device=device.NAME)).plan.reasons
    return {
        "format": planned.weight_format,
        "dtype": planned.dtype,
        "head": planned.head_format,
        "routers": planned.router_format,
        "layers": [asdict(layer) for layer in planned.layer_formats],
        "reason": dict(reasons)["weights"],
        "is_equal": got == expected,
        "is_hybrid_equal": all(it == expected for it in hybrid),
        "num_tokens": len({token for answer in got.values() for token in answer}),
        "launches": counts["launches"],
    }


def _hybrid(config: EngineConfig) -> EngineConfig:
    """Return a configuration with two of each layer's experts on the GPU. The longest prompt streams all others."""
    shares = HybridConfig(
        num_gpu_experts=2,
        cpu_weight_format=config.weight_format,
        cpu_isa=extension.best_isa(""),
        stream_tokens=len(PROMPTS[-1]),
    )
    return replace(config, hybrid=shares, is_wide=True)  # integers meet activations of 16 bits on the CPU


def _can_move_experts(config: EngineConfig) -> bool:
    """Return whether the CPU's experts have a way to the GPU."""
    formats = {it for layer in config.layer_formats for it in (layer.up, layer.down)} or {config.weight_format}
    return formats <= {*packed_bands.FORMATS}


if __name__ == "__main__":
    main(sys.argv[1:])

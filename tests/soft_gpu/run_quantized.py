"""Runs tiny models with integer weights on the GPU in software, with and without graphs, and prints JSON.

python -m tests.soft_gpu.run_quantized FAMILY...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.soft_gpu import machine

machine.prepare()

from moeflow.engine import decode_graphs  # noqa: E402
from moeflow.planner.resolve import resolve  # noqa: E402
from moeflow.settings.settings import Settings  # noqa: E402
from studies.small_families import greedy_answers, write_small  # noqa: E402
from tests.soft_gpu import device, kernels  # noqa: E402

PROMPT_LENS = (5, 1, 33)
NUM_TOKENS = 6


def main(families: list[str]) -> None:
    """Print one object for each family."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({family: _run(family, Path(folder, family)) for family in families}))


def _run(family: str, folder: Path) -> dict[str, Any]:
    """Return the formats of each quantization, whether eager passes and graphs give the same tokens, and copies."""
    write_small(family, folder)
    found: dict[str, Any] = {}
    for quantize in ("int8", "int4"):
        settings = Settings(
            model=str(folder), device=device.NAME, quantize=quantize, max_model_len=112, kv_cache_bytes=8 << 20
        )
        config = resolve(settings).config
        device.COUNTS.clear()
        with device.soft_gpu(), kernels.soft_kernels():
            graphs = greedy_answers(config, PROMPT_LENS, NUM_TOKENS)
            with mock.patch.object(decode_graphs, "can_capture", return_value=False):
                eager = greedy_answers(config, PROMPT_LENS, NUM_TOKENS)
        found[quantize] = {
            "format": config.weight_format,
            "head": config.head_format,
            "is_equal": graphs == eager,
            "pageable_copies": dict(device.COUNTS.pageable_copies),
        }
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

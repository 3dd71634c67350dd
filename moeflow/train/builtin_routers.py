"""The packaged routers of the built-in model, since fitting them takes most of the time.

`upcycle` fits the same routers to the built-in recipe, calibration text and source. The file holds their fingerprint
and is used for no other. `scripts/fit_builtin_routers.py` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROUTERS_FILE = Path(__file__).parent / "calibration" / "builtin_routers.safetensors"
_FINGERPRINT = "fingerprint"


def read_routers(file: Path, fingerprint: str) -> list[torch.Tensor] | None:
    """Return one router per layer, [E, H] bf16; None without a file for this fingerprint."""
    if not file.exists():
        return None
    with safe_open(file, framework="pt") as tensors:
        if (tensors.metadata() or {}).get(_FINGERPRINT) != fingerprint:
            return None
        return [tensors.get_tensor(_name(layer)) for layer in range(len(tensors.keys()))]


def write_routers(file: Path, fingerprint: str, routers: Sequence[torch.Tensor]) -> None:
    """Write one router per layer, [E, H], rounded to bf16."""
    tensors = {_name(layer): router.to(torch.bfloat16) for layer, router in enumerate(routers)}
    save_file(tensors, file, metadata={_FINGERPRINT: fingerprint})


def _name(layer: int) -> str:
    return f"layers.{layer}"

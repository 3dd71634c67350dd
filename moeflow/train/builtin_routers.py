"""The routers of the built-in model, which come with the package: fitting them is most of the work of making it.

They are those that `upcycle` fits to the built-in recipe, calibration text and source. The file names these by a
fingerprint; for any other the file is not used. `scripts/fit_builtin_routers.py` writes it.
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
    """Return one router a layer, [E, H] bf16; None if there is no such file or it belongs to another model."""
    if not file.exists():
        return None
    with safe_open(file, framework="pt") as tensors:
        if (tensors.metadata() or {}).get(_FINGERPRINT) != fingerprint:
            return None
        return [tensors.get_tensor(_name(layer)) for layer in range(len(tensors.keys()))]


def write_routers(file: Path, fingerprint: str, routers: Sequence[torch.Tensor]) -> None:
    """Write one router a layer, [E, H], rounded to bf16 as the model's own file has them."""
    tensors = {_name(layer): router.to(torch.bfloat16) for layer, router in enumerate(routers)}
    save_file(tensors, file, metadata={_FINGERPRINT: fingerprint})


def _name(layer: int) -> str:
    return f"layers.{layer}"

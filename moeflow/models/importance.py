"""How much each input of a model's matrices matters, for rounding weights: an importance matrix.

An error in a weight costs, on average over text, its square times the mean square of the activation that it meets. So
that mean is stored, a vector for each matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.on_demand import on_demand

with on_demand(__name__):
    import safetensors
    from safetensors import numpy as array_files

    from moeflow.core import whole_file

Importance = Mapping[str, NDArray[np.float32]]  # by the name of a checkpoint's matrix [N, H]: [H], all above zero

NO_IMPORTANCE: Final[Importance] = {}  # all inputs alike


def importance_file(cache_dir: Path, identity: str) -> Path:
    """Return the path of a checkpoint's importance."""
    return cache_dir / "importance" / f"{identity}.safetensors"


def load_importance(file: Path) -> Importance | None:
    """Return the stored importance; None if there is nothing, or nothing that can be read."""
    try:
        found: dict[str, NDArray[np.float32]] = array_files.load_file(file)
    except (OSError, safetensors.SafetensorError):
        return None
    return found


def save_importance(importance: Importance, file: Path) -> None:
    """Keep it. Raises: OSError."""
    with whole_file.whole_file(file) as new:
        array_files.save_file(dict(importance), new)


def known_importance(file: str) -> Importance:
    """Return what the file of an `EngineConfig` says; where there is none, nothing."""
    return (load_importance(Path(file)) if file else None) or NO_IMPORTANCE

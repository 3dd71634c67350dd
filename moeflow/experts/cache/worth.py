"""What decides which experts leave while kernels run over several layers, and nobody can ask."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class MayLeave(IntEnum):
    """When an expert may leave its slot; as in csrc/io/expert_fetcher.h."""

    NEVER = 0  # while the pass runs
    NOW = 1
    BEHIND = 2  # as soon as the pass has computed its layer


@dataclass(frozen=True, slots=True)
class Worth:
    """What experts are worth to later layers and passes: whose is lowest leaves first. Shapes: [all experts] each."""

    before: NDArray[np.float64]  # as long as the pass has yet to come to their layer
    used: NDArray[np.float64]  # once it has used them; infinite: they stay
    unused: NDArray[np.float64]  # once it has not
    may_leave: NDArray[np.uint8]  # a `MayLeave` each

"""The worth of experts: kernels evict the least worthy during a pass."""

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
    """The worth of experts to later layers and passes; the lowest is evicted first. Shapes: [all experts] each."""

    before: NDArray[np.float64]  # until the pass reaches their layer
    used: NDArray[np.float64]  # after the pass has used them; infinite: never evict
    unused: NDArray[np.float64]  # after the pass has computed their layer without them
    may_leave: NDArray[np.uint8]  # a `MayLeave` each

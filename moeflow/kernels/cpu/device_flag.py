"""A number in main memory that a GPU writes, and a wait for it without Python's lock."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from moeflow.kernels.arrays import address

if TYPE_CHECKING:
    from torch import Tensor

with suppress(ImportError):  # without it nothing here works; `cpu.why_not` says why
    import moeflow.kernels._cpu as _cpu

LOWERED: Final = 0


class DeviceFlag:
    """A flag in memory that a GPU writes."""

    def __init__(self, memory: Tensor) -> None:
        """Take memory, [1] int64, which is 0 as long as the flag is lowered."""
        self.memory = memory
        self._numbers = memory.numpy()
        self._address = address(memory)

    def wait(self, seconds: float) -> bool:
        """Spin until the flag is raised, at most so long. Return whether it is.

        All that the GPU wrote before the flag is then visible.
        """
        is_raised: bool = _cpu.wait_for_flag(self._address, seconds)
        return is_raised

    def lower(self) -> None:
        """Lower the flag, before the GPU can raise it again."""
        self._numbers[0] = LOWERED

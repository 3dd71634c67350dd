"""A model's routing profile: the experts that a pass uses, and its reads from disk.

The profile is learnt once from text in the package, replayed through the expert cache at several sizes, and kept in the
cache folder. Without one, routers are assumed to choose evenly and independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.hit_curve import EVEN, HitCurve

with on_demand(__name__):
    from moeflow.core import whole_file

VERSION: Final = 2  # raised when the meaning of the numbers changes
SHARES_ON_DISK: Final = (0.1, 0.3, 0.5, 0.7, 0.9)  # of experts, in the replayed caches


class PassReads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Passes of one size. Both counts are shares of the experts that even routers would use."""

    num_tokens: int
    distinct: float  # experts that are used
    reads: tuple[float, ...]  # experts that are read, for each of SHARES_ON_DISK


class RoutingProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The behaviour of a model's routers; without passes: even and independent choices."""

    decode: tuple[PassReads, ...] = ()  # a token of each sequence, by their number
    prefill: tuple[PassReads, ...] = ()  # parts of prompts, by their length
    num_tokens: int = 0  # in the replayed text
    cold: tuple[float, ...] = ()  # share of choices that the least popular experts get, for each of SHARES_ON_DISK
    version: int = VERSION

    def decode_misses(self, batch_size: float) -> HitCurve:
        """Return the reads of a pass over so many sequences, relative to the experts that even routers would use."""
        return self._curve(self.decode, batch_size)

    def prefill_misses(self, num_tokens: float) -> HitCurve:
        """Return the same of a pass over so many tokens of prompts."""
        return self._curve(self.prefill, num_tokens)

    def decode_distinct(self, batch_size: float) -> float:
        """Return the experts that such a pass uses, relative to even routers."""
        return _between(self.decode, batch_size, [it.distinct for it in self.decode])

    def prefill_distinct(self, num_tokens: float) -> float:
        """Return the same of a pass over so many tokens of prompts."""
        return _between(self.prefill, num_tokens, [it.distinct for it in self.prefill])

    @cached_property
    def cold_choices(self) -> HitCurve:
        """The share of choices that the least popular experts get, by their share of all experts."""
        return HitCurve.through(zip(SHARES_ON_DISK, self.cold, strict=True)) if self.cold else EVEN

    def _curve(self, passes: Sequence[PassReads], num_tokens: float) -> HitCurve:
        if not passes:
            return EVEN
        key = (passes is self.decode, num_tokens)
        if key not in self._curves:
            reads = [_between(passes, num_tokens, column) for column in zip(*(it.reads for it in passes), strict=True)]
            self._curves[key] = HitCurve.through(zip(SHARES_ON_DISK, reads, strict=True))
        return self._curves[key]

    @cached_property
    def _curves(self) -> dict[tuple[bool, float], HitCurve]:
        return {}  # by size: a search asks for the same ones many times


EVEN_ROUTING: Final = RoutingProfile()


def profile_file(cache_dir: Path, identity: str) -> Path:
    """Return the file of a checkpoint's profile."""
    return cache_dir / "routing" / f"{identity}.json"


def load_profile(file: Path) -> RoutingProfile | None:
    """Return the kept profile; None if it is missing or of another version."""
    try:
        profile = msgspec.json.decode(file.read_bytes(), type=RoutingProfile)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return profile if profile.version == VERSION else None


def save_profile(profile: RoutingProfile, file: Path) -> None:
    """Keep a profile. Raises: OSError."""
    with whole_file.whole_file(file) as new:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))


def _between(passes: Sequence[PassReads], num_tokens: float, values: Sequence[float]) -> float:
    """Return a value at a size, linear in its logarithm between known sizes; 1 if none is known."""
    if not passes:
        return 1.0
    return float(np.interp(math.log(max(num_tokens, 1.0)), [math.log(it.num_tokens) for it in passes], values))

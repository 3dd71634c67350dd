"""The cost of remote experts for a pass: a round trip per layer, bytes of rows and results, and computing there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from moeflow.core.engine_config import LenderConfig
from moeflow.planner.costs.disk_waits import ExpertReads

_MEMORY_BYTES_PER_S: Final = 8e9  # of a lender's core that reads experts: assumed until it has computed


class RemoteRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one lender for experts of one size."""

    round_trip_s: float
    row_s: float  # of hidden states, or of results, over the link
    computing_s: float  # of an expert

    @classmethod
    def of(cls, lender: LenderConfig, hidden: int, slab_bytes: int) -> RemoteRates:
        """Return the rates of a lender that has answered."""
        row_s = 4 * hidden / lender.bytes_per_s
        return cls(round_trip_s=lender.round_trip_s, row_s=row_s, computing_s=slab_bytes / _MEMORY_BYTES_PER_S)

    def expert_s(self, num_experts: float) -> float:
        """Return the seconds of each of so many experts that one token needs in a layer."""
        return self.round_trip_s / num_experts + (1 / num_experts + 1) * self.row_s + self.computing_s


def step_with_lenders_s(
    step_s: float, reads: ExpertReads, on_disk: float, share: float, rates: Sequence[RemoteRates]
) -> float:
    """Return the seconds of a step that takes `step_s` with the disk alone, if lenders have a share of its experts.

    The hit rate stays the same: the most used experts are in local memory in either case.
    """
    num_read = reads.num_read(on_disk)
    if not num_read or not rates:
        return step_s
    num_remote = num_read * share
    per_layer = max(num_remote / reads.num_layers, 1.0)
    remote_s = num_remote * min(it.expert_s(per_layer) for it in rates)
    stops_s = min(reads.num_layers, num_remote) * reads.stop_s
    return step_s - reads.wait_s(num_read) + reads.wait_s(num_read - num_remote) + remote_s + stops_s

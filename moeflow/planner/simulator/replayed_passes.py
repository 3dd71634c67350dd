"""The passes of a trace of routing, prepared for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeflow.core.errors import ConfigError
from moeflow.workload.routing_trace import ExpertIds, RoutingTrace

Named = Sequence[Sequence[int]]  # a network's experts of each layer, likeliest first


@dataclass(frozen=True)
class ReplayedPass:
    """A pass."""

    ids: ExpertIds  # [layers, tokens, K]
    num_generated: int = 0
    compute_s: float = 1.0  # without waits
    ahead: ExpertIds | None = None  # [layers, A, tokens, K], the next routers' choices for the same input
    named: Named | None = None  # by a network before the pass

    @cached_property
    def needed(self) -> list[list[int]]:
        """Of each layer: the distinct experts, ascending."""
        return [np.unique(layer).tolist() for layer in self.ids]

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return int(self.ids.shape[1])


def prepare_passes(
    trace: RoutingTrace, compute_s: float | None, named: Sequence[Named | None] = ()
) -> list[ReplayedPass]:
    """Return a trace's passes; each computes for `compute_s`, None: as long as it was recorded.

    `named` has a network's prediction for each; empty: no network.

    Raises: ConfigError if there is no pass, or its time is needed and not known.
    """
    if not trace.passes:
        raise ConfigError("the trace has no passes. Record one with --record-routing and generate some tokens")
    if compute_s is None and not any(routed.compute_s for routed in trace.passes):
        raise ConfigError("the trace lacks its passes' computing times. Give one with --compute-time")
    return [
        ReplayedPass(
            routed.ids,
            routed.num_generated,
            routed.compute_s if compute_s is None else compute_s,
            routed.ahead,
            of_pass,
        )
        for routed, of_pass in zip(trace.passes, named or [None] * len(trace.passes), strict=True)
    ]

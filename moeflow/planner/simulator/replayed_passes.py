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

    ids: ExpertIds  # [layers, tokens, K], the experts that routers chose
    num_generated: int
    compute_s: float  # without waits
    ahead: ExpertIds | None = None  # [layers, A, tokens, K], the choices of the next routers; None: unknown
    named: Named | None = None  # a network's prediction before the pass; None: no prediction

    @cached_property
    def needed(self) -> list[list[int]]:
        """The distinct experts of each layer, ascending."""
        return [np.unique(layer).tolist() for layer in self.ids]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that it computes."""
        num_tokens: int = self.ids.shape[1]
        return num_tokens


def prepare_passes(
    trace: RoutingTrace, compute_s: float | None, named: Sequence[Named | None] = ()
) -> list[ReplayedPass]:
    """Return a trace's passes; each computes for `compute_s`, None: as long as it was recorded.

    `named` has a network's prediction for each; empty: no network.

    Raises: ConfigError if there is no pass, or its time is needed and not known.
    """
    if not trace.passes:
        raise ConfigError("the trace has no pass in it. Record one with --record-routing and generate something")
    if compute_s is None and not any(routed.compute_s for routed in trace.passes):
        raise ConfigError("the trace does not report how long its passes computed. Give it with --compute-time")
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

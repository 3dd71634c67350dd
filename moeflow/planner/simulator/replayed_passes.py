"""The passes of a routing trace, prepared for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeflow.core.errors import ConfigError
from moeflow.workload.routing_trace import ExpertIds, RoutingTrace

Named = Sequence[Sequence[int]]  # of each layer: experts named by a network, likeliest first


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """A pass."""

    chosen: list[list[int]]  # of each layer: the experts of all tokens, repeated
    needed: list[list[int]]  # of each layer: the distinct ones, ascending
    num_tokens: int
    num_generated: int
    compute_s: float  # without waits
    ahead: ExpertIds | None = (
        None  # [layers, A, tokens, K], the next routers' choices for the same input; None: not known
    )
    named: Named | None = None  # by a network before the pass; None: no network


def prepare_passes(
    trace: RoutingTrace, compute_s: float | None, named: Sequence[Named | None] = ()
) -> list[ReplayedPass]:
    """Return a trace's passes; each computes for `compute_s`, None: as long as it was recorded.

    `named` has a network's experts for each; empty: no network.

    Raises: ConfigError if there is no pass, or its time is needed and not known.
    """
    if not trace.passes:
        raise ConfigError("the trace has no passes. Record one with --record-routing and generate some tokens")
    if compute_s is None and not any(routed.compute_s for routed in trace.passes):
        raise ConfigError("the trace lacks its passes' computing times. Give one with --compute-time")
    return [
        ReplayedPass(
            chosen=[layer.ravel().tolist() for layer in routed.ids],
            needed=[np.unique(layer).tolist() for layer in routed.ids],
            num_tokens=routed.ids.shape[1],
            num_generated=routed.num_generated,
            compute_s=routed.compute_s if compute_s is None else compute_s,
            ahead=routed.ahead,
            named=of_pass,
        )
        for routed, of_pass in zip(trace.passes, named or [None] * len(trace.passes), strict=True)
    ]

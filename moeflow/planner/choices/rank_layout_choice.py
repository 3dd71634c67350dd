"""Which layouts the ranks of an engine get where the user leaves them open: those with the shortest forecast.

Weights have one layout for prompts and for decoding. So the planner compares the time of the usage's requests, prompt
and answer. The least memory decides where that alone fits; where a machine's speed is unknown, the usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.plan import Policy
from moeflow.core.units import format_seconds
from moeflow.planner.costs.cost_model import CostModel


class LayoutForecast(msgspec.Struct, frozen=True):
    """What a pair of layouts is expected to bring."""

    parallel: ParallelConfig
    prefill_s: float  # of the prompts of all sequences
    decode_s: float  # of all their answers

    @property
    def seconds(self) -> float:
        """Of all requests."""
        return self.prefill_s + self.decode_s

    @property
    def name(self) -> str:
        """Layout of experts and of attention; of a model without experts the latter."""
        return f"{self.parallel.expert_layout}/{self.parallel.attention_layout}"


def choose_rank_layouts(
    candidates: Sequence[ParallelConfig],
    costs: Callable[[ParallelConfig], CostModel],
    num_sequences: int,
    reasons: list[tuple[str, str]],
) -> ParallelConfig:
    """Return the fastest of the candidates, which all fit, for so many sequences; say why."""
    found = sorted(
        (_forecast(parallel, costs(parallel), num_sequences) for parallel in candidates), key=lambda it: it.seconds
    )
    best = found[0]
    if len(found) > 1:
        how = "as was learnt" if costs(best.parallel).routing.decode else "taken to be even"
        reasons.append(("layouts of ranks", f"{_reason(best, found[1:], num_sequences)}; routing: {how}"))
    return best.parallel


def _forecast(parallel: ParallelConfig, model: CostModel, num_sequences: int) -> LayoutForecast:
    policy = Policy(
        batch_size=num_sequences,
        micro_batch=num_sequences,
        attention_on_device=False,
        ffn_on_device=False,
        chunk_tokens=model.chunk_tokens,
    )
    it = model.predict(policy)
    return LayoutForecast(parallel, it.prefill_s, (model.workload.gen_len - 1) * it.decode_s)


def _reason(best: LayoutForecast, others: Sequence[LayoutForecast], num_sequences: int) -> str:
    """Report how long all alternatives take, and whether prompts or decoding alone would have another one."""
    requests = "a request" if num_sequences == 1 else f"{num_sequences} requests together"
    figures = ", ".join(f"{format_seconds(other.seconds)} {other.name}" for other in others)
    text = f"{best.name}: {requests} should take {format_seconds(best.seconds)}, against {figures}"
    of_prompts = min((best, *others), key=lambda it: it.prefill_s)
    of_decoding = min((best, *others), key=lambda it: it.decode_s)
    if of_prompts is not of_decoding:
        text += f"; for prompts alone {of_prompts.name}, for decoding alone {of_decoding.name} would be faster"
    return text

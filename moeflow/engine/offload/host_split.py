"""How many of the layers' experts the host computes in a pass, so that link and host are done at the same time.

An expert that the host computes need not be streamed. What that is worth is measured while passes run: the link's bytes
a second, the host's seconds for attention and for experts. Results do not depend on the share, so a wrong draft costs
time only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final

from moeflow.core.running_fit import RunningFit
from moeflow.planner.costs.model_costs import ModelCosts

WORTH_IT: Final = 0.97  # of what the pass would take otherwise
_MEMORY: Final = 64.0  # transfers, or layers
_NEAR: Final = 2  # bits of the number of tokens: a pass of another size is measured for itself


def _rate() -> RunningFit:
    """Return an estimate of seconds a unit: 0 until one is observed."""
    return RunningFit([0.0], _MEMORY)


class HostExpertSplit:
    """Measures, and chooses for each pass. Lanes time their work in their own threads, one kind of work each."""

    def __init__(
        self, costs: ModelCosts, has_experts: Sequence[bool], num_streamed: int, fixed: int | None = None
    ) -> None:
        """Choose among the first `num_streamed` experts of layers that have any; `fixed` is the number to use."""
        self.borders = [0] * len(has_experts)  # of each layer: the host has the experts below
        self._costs = costs
        self._has_experts = list(has_experts)
        self._num_streamed = num_streamed
        self._fixed = fixed
        self._link, self._attention = _rate(), _rate()  # a byte; a position whose keys and values are read
        self._experts: dict[int, RunningFit] = {}  # a token and expert, by the size of the pass: small ones reuse less
        self._size, self._num_micro_batches = 0, 1

    @property
    def num_hosted(self) -> int:
        """The host's number of experts, summed over layers."""
        return sum(self.borders)

    def begin_pass(self, num_tokens: int, num_read: float, num_micro_batches: int) -> None:
        """Choose for a pass of so many tokens that attend to so many positions, in each layer."""
        self._size, self._num_micro_batches = num_tokens.bit_length(), num_micro_batches
        if self._fixed is None:
            self._share_out(self._best(num_tokens, num_read))
        else:
            self._share_out(min(self._fixed, self._num_streamed) * sum(self._has_experts))

    def uploaded(self, num_bytes: float, seconds: float) -> None:
        """Record a transfer of weights."""
        self._link.observe(seconds, num_bytes)

    def attended(self, num_read: float, seconds: float) -> None:
        """Record attention on the host, to so many positions."""
        self._attention.observe(seconds, num_read)

    def computed(self, num_hosted: float, num_tokens: float, seconds: float) -> None:
        """Record the computation of so many of a layer's experts on the host, for a micro-batch."""
        self._experts.setdefault(self._size, _rate()).observe(seconds, num_tokens * num_hosted)

    @contextmanager
    def attending(self, num_read: int) -> Iterator[None]:
        """Time a layer's attention on the host."""
        start = perf_counter()
        yield
        self.attended(num_read, perf_counter() - start)

    @contextmanager
    def computing(self, layer: int, num_tokens: int) -> Iterator[None]:
        """Time a layer's experts on the host, for a micro-batch."""
        start = perf_counter()
        yield
        self.computed(self.borders[layer], num_tokens, perf_counter() - start)

    def _share_out(self, num_hosted: int) -> None:
        """Distribute so many experts over the layers, as evenly as possible."""
        num_layers, before = sum(self._has_experts), 0
        for layer, has_experts in enumerate(self._has_experts):
            if has_experts:
                self.borders[layer] = (before + 1) * num_hosted // num_layers - before * num_hosted // num_layers
                before += 1

    def _best(self, num_tokens: int, num_read: float) -> int:
        """Return the number of experts of all layers that makes the pass shortest.

        Link and host work at once. But a layer's hidden states reach the device behind a page of the next layer's
        weights, and the host waits for them.
        """
        most, num_layers = self._num_streamed * sum(self._has_experts), sum(self._has_experts)
        if not most or not self._link.seconds(1):
            return 0
        expert_s = self._expert_s
        if expert_s is None:
            return num_layers  # one each, to see how fast the host is
        attention_s = self._attention.seconds(num_read * len(self.borders))
        page_s = self._link.seconds(self._costs.expert_bytes) / self._num_micro_batches  # of each streamed expert

        def seconds(num_hosted: int) -> float:
            waits_s = attention_s + expert_s * num_tokens * num_hosted + page_s * (most - num_hosted)
            return max(self._link_s(num_tokens, num_hosted), waits_s)

        best = bisect_left(range(most), True, key=lambda some: seconds(some + 1) >= seconds(some))
        return self.num_hosted if seconds(self.num_hosted) * WORTH_IT <= seconds(best) else best

    def _link_s(self, num_tokens: int, num_hosted: int) -> float:
        """Return the link's seconds for weights, attention results, and the host's sums."""
        costs, shape, num_layers = self._costs, self._costs.shape, sum(self._has_experts)
        attended = shape.attended_size * costs.formats.activation_bytes * len(self.borders)
        with_sums = 1 - (1 - num_hosted / num_layers / shape.routing.num_experts) ** shape.routing.top_k  # of tokens
        small = num_tokens * (attended + 4 * shape.hidden_size * with_sums * num_layers)
        weights = (self._num_streamed * num_layers - num_hosted) * costs.expert_bytes
        return self._link.seconds(weights + small)

    @property
    def _expert_s(self) -> float | None:
        """Return what a token and expert takes in passes of about this size; None: it is not known."""
        known = {size: unit_s for size, rate in self._experts.items() if (unit_s := rate.seconds(1))}
        nearest = min(known, key=lambda size: abs(size - self._size), default=None)
        return None if nearest is None or abs(nearest - self._size) > _NEAR else known[nearest]

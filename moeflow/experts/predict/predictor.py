"""What every predictor of experts offers. It only orders prefetches: the true router decides what is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Routes(Protocol):
    """A layer's router."""

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return topk_ids and topk_weights [T, K] of hidden [T, H]."""


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """What a predictor is made for."""

    num_layers: int  # with experts
    num_experts: int  # of a layer
    routers: Sequence[Routes] = ()  # of these layers; none where a trace is replayed


class Predictor(ABC):
    """Guesses a layer's experts. A new one is a file in this folder and a row in `registry.py`."""

    # Whether it asks the next layer's router. Kernels do so by themselves, and a trace cannot be replayed with it.
    by_next_router: ClassVar[bool] = False

    def __init__(self, model: RoutedModel) -> None:  # noqa: B027
        """Start without a past."""

    def observe(self, layer: int, expert_ids: Sequence[int]) -> None:  # noqa: B027
        """Receive what a layer's router chose in a pass: each token's experts, repeated if several tokens chose one."""

    def observe_input(self, layer: int, hidden: Tensor) -> None:  # noqa: B027
        """Receive a layer's input [T, H], before the next layer is predicted."""

    @abstractmethod
    def predict(self, layer: int) -> list[int]:
        """Return the experts that a layer will need next, likeliest first; only those worth prefetching."""

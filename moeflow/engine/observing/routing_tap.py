"""Takes the choices of a model's routers, pass by pass, while it is open. A closed tap changes nothing in a pass.

Choices come from kernels that run all layers, from replayed graphs, or from one layer after another. Of ranks with
sequences of their own, the first gets all choices, since ranks share the experts. A pass may be cut into pieces: each
layer's pieces come in the order of the pass, unless what runs them has a `row_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moeflow.engine.forward import Forward
from moeflow.kernels.arrays import Array, is_numpy, on_host
from moeflow.kernels.on_demand import torch
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.packed_layers import OnChoices
from moeflow.models.layers.weight_allocator import OnRoute

if TYPE_CHECKING:
    from moeflow.engine.offload.offloaded_model import OffloadedModel
    from moeflow.models.language_model import LanguageModel

ExpertIds = NDArray[np.int64]


@runtime_checkable
class ChoiceSource(Protocol):
    """Runs all layers of a pass at once, and reports what their routers chose."""

    on_choices: OnChoices | None  # receives [layers, T, K]


class LayerSource(Protocol):
    """Reports what routers chose, layer by layer, for the tokens of all ranks."""

    on_choices: Callable[[int, Any], None] | None  # receives the layer's number and [T, K]


@runtime_checkable
class HasRounds(Protocol):
    """Runs passes whose tokens are on several ranks."""

    rounds: LayerSource


@runtime_checkable
class HasRowOrder(Protocol):
    """Runs the rows of a pass in another order."""

    row_order: Any  # [T], of the last pass: the place in the pass of each row that layers got; None: no other order


class RoutingTap:
    """The tap of one model."""

    def __init__(
        self, model: LanguageModel | OffloadedModel, forward: Forward, layer_groups: Sequence[range], top_k: int
    ) -> None:
        """`layer_groups` are layers with routers, numbered from 0: those of a group get the same tokens."""
        self._model = model
        runs = (model.packed_layers, forward)
        self._sources = [it for it in runs if isinstance(it, ChoiceSource)]
        self._rounds = forward.rounds if isinstance(forward, HasRounds) else None
        self._orders = [it for it in (model, forward) if isinstance(it, HasRowOrder)]
        self._groups = layer_groups
        self._top_k = top_k
        self._blocks: list[tuple[MoE, OnRoute | None]] = []  # with a copy of a block, and its former `on_route`
        self._layers: list[list[Array]] = []  # of each layer of the pass: pieces [t, K]
        self._whole: list[Array] = []  # pieces of all layers: [layers, t, K]
        self._is_in_pass = False

    def open(self) -> None:
        """Take the choices of the passes from now on. Not during a pass."""
        if not self._groups:
            return
        if self._rounds is not None:
            self._rounds.on_choices = self._take_round
            return
        numbers: dict[str, int] = {}  # of layers, by the prefixes of their blocks
        for prefix, block in self._model.moe_blocks():
            number = numbers.setdefault(prefix, len(numbers))
            self._blocks.append((block, block.on_route))
            block.on_route = partial(self._take_layer, number, block.on_route)
        self._set_on_choices(self._take_whole)

    def close(self) -> None:
        """Take nothing more: everything is as before `open`. Not during a pass."""
        for block, before in self._blocks:
            block.on_route = before
        self._blocks.clear()
        self._set_on_choices(None)
        if self._rounds is not None:
            self._rounds.on_choices = None

    def begin_pass(self) -> None:
        """Begin a pass. Choices outside of passes, such as those of drafts, are not taken."""
        self._layers = [[] for group in self._groups for _ in group]
        self._whole = []
        self._is_in_pass = True

    def end_pass(self) -> list[ExpertIds | None]:
        """End a pass; return of each group of layers [layers, T, K], or None if its routers were not asked.

        T counts the rows that these layers got. Blocks: until a GPU has the choices.
        """
        self._is_in_pass = False
        layers, whole, self._layers, self._whole = self._layers, self._whole, [], []
        if whole:
            return [self._ordered(on_host(_joined(whole, dim=1)))]
        return [self._of_group([layers[layer] for layer in group]) for group in self._groups if layers]

    def _of_group(self, layers: list[list[Array]]) -> ExpertIds | None:
        if not all(layers):
            return None
        return self._ordered(on_host(_stacked([_joined(pieces, dim=0) for pieces in layers])))

    def _ordered(self, choices: ExpertIds) -> ExpertIds:
        """Return choices in the order of the pass's rows."""
        for it in self._orders:
            if it.row_order is not None:
                found = np.empty_like(choices)
                found[:, on_host(it.row_order)] = choices
                return found
        return choices

    def _take_layer(self, number: int, before: OnRoute | None, topk_ids: Array, hidden: Array | None) -> None:
        if before is not None:
            before(topk_ids, hidden)
        if self._is_in_pass:
            self._layers[number].append(topk_ids)

    def _take_round(self, number: int, topk_ids: Array) -> None:
        if self._is_in_pass:
            self._layers[number].append(topk_ids)

    def _take_whole(self, topk_ids: Array) -> None:
        if self._is_in_pass:
            self._whole.append(topk_ids[:, :, : self._top_k])

    def _set_on_choices(self, on_choices: OnChoices | None) -> None:
        for source in self._sources:
            source.on_choices = on_choices


def _joined(pieces: list[Any], dim: int) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces, axis=dim) if is_numpy(pieces[0]) else torch.cat(pieces, dim=dim)


def _stacked(layers: list[Any]) -> Any:
    return np.stack(layers) if is_numpy(layers[0]) else torch.stack(layers)

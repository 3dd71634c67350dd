"""Has a network choose experts in the place of the routers, as SiDA was published (2310.18859, section 3).

Wrong predictions change answers: a server marks it in its model's name. Routers are not asked, so that
what a pass needs is known before it begins. Encoders have tables of their inputs. A decoder's next token is known only
when its pass begins, so there the network is asked then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from moeflow.core.batch import Batch
from moeflow.core.errors import ConfigError
from moeflow.core.request import Request
from moeflow.experts.prefetch.expert_tables import ExpertTables
from moeflow.experts.prefetch.followed_texts import FollowedTexts
from moeflow.kernels.routing import Routing
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.moe import Given

if TYPE_CHECKING:
    from torch import Tensor


class Choices(Protocol):
    """The choices of experts for one stack of layers."""

    of_layers: Sequence[Given]  # of those with experts, in order

    def expect(self, request: Request) -> None:
        """Take notice of a request that waits for its pass."""

    def begin_pass(self, batch: Batch) -> None:
        """Have the choices of a pass ready. Blocks: until they are."""

    def close(self) -> None:
        """End what runs."""


class InputChoices:
    """Gives an encoder's layers the experts and weights of the tables: alpha, the network's probabilities."""

    def __init__(self, tables: ExpertTables, num_layers: int, *, top_k: int) -> None:
        """Take the number of the encoder's layers with experts, and how many experts compute for a token."""
        self._tables, self._top_k = tables, top_k
        self._experts = self._alpha = torch.empty(0)  # of all input tokens of a pass: [T, layers, K]
        self.of_layers: Sequence[Given] = [partial(self._choice, layer) for layer in range(num_layers)]

    def expect(self, request: Request) -> None:
        """Have the table of a request's input built, which waits for its pass."""
        self._tables.expect(request)

    def begin_pass(self, batch: Batch) -> None:
        """Have the layers compute with what tables say of the pass's inputs. Blocks: until these are there."""
        self._tables.begin_pass(batch)
        if tables := self._tables.of_pass():
            self._experts = torch.cat([table.experts[..., : self._top_k] for table in tables])
            self._alpha = torch.cat([table.alpha[..., : self._top_k] for table in tables])

    def close(self) -> None:
        """End the lane of the tables. Blocks: until it is through with the input that it is at."""
        self._tables.close()

    def _choice(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return topk_ids [T, K] int64 and topk_weights [T, K] float32."""
        return self._experts[:, layer].contiguous(), self._alpha[:, layer].clone(memory_format=torch.contiguous_format)


class TextChoices:
    """Gives a decoder's layers the network's logits for the tokens of a pass; the family's rule chooses by them."""

    def __init__(self, texts: FollowedTexts, rules: Sequence[Routing], *, top_k: int) -> None:
        """Take the rules of the layers with experts, in order, and how many experts compute for a token.

        Raises: ConfigError if a rule needs more than the network knows: logits up to a constant.
        """
        for rule in rules:
            if rule.score != "softmax" or rule.choice_bias is not None or rule.num_groups > 1:
                raise ConfigError(
                    "--lossy-routing needs routers that choose by a softmax alone, and this model's have other scores, "
                    "a bias of the choice or groups of experts: remove it"
                )
        self._texts = texts
        self._logits = torch.empty(0)  # of the pass's tokens: [T, layers, E]
        self.of_layers: Sequence[Given] = [
            partial(self._choice, layer, replace(rule, top_k=top_k)) for layer, rule in enumerate(rules)
        ]

    def expect(self, request: Request) -> None:
        """Do nothing: a decoder's tokens come pass by pass."""

    def begin_pass(self, batch: Batch) -> None:
        """Ask the network. Blocks: while it computes."""
        self._logits = self._texts.logits_for(batch)

    def close(self) -> None:
        """Nothing runs."""

    def _choice(self, layer: int, rule: Routing) -> tuple[Tensor, Tensor]:
        """Return topk_ids [T, K] int64 and topk_weights [T, K] float32."""
        return rule(self._logits[:, layer].contiguous())


class LossyRouting:
    """The choices of all stacks of a model."""

    def __init__(self, model: LanguageModel, choices: Sequence[Choices]) -> None:
        """Take the stacks in the order of the model's layers, and have the model choose by them."""
        self._choices = choices
        model.choose_by([choice for each in choices for choice in each.of_layers])

    def expect(self, request: Request) -> None:
        """See `Choices`."""
        for each in self._choices:
            each.expect(request)

    def begin_pass(self, batch: Batch) -> None:
        """See `Choices`."""
        for each in self._choices:
            each.begin_pass(batch)

    def close(self) -> None:
        """See `Choices`."""
        for each in self._choices:
            each.close()

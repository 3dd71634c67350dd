"""GPT with experts in some layers, written out in plain torch from the papers' descriptions: an oracle of our own.

Pre-norm layers (GPT-2), experts as GShard and Switch Transformers choose them (2006.16668, 2101.03961), positions as
learned or as tensor2tensor's sinusoids.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from tests.models.parity import Parity

VOCAB, HIDDEN, LAYERS, HEADS, WIDTH, EXPERTS, LENGTH = 97, 32, 4, 4, 48, 4, 128


@dataclass(frozen=True)
class Choices:
    """What such models differ in."""

    activation: str  # "relu", "gelu" or "tanh"
    top_k: int
    is_sinusoidal: bool = False
    first_row: int = 0  # of positions
    token_scale: float = 1.0
    is_tied: bool = True
    dense_width: int = WIDTH
    moe_layers: tuple[int, ...] = (1, 3)


class PlainGPT:
    """Such a model of random weights; called like transformers' models."""

    def __init__(self, choices: Choices) -> None:
        torch.manual_seed(1)
        self.choices = choices
        self.weights: dict[str, torch.Tensor] = {"tokens": self._random(VOCAB, HIDDEN)}
        if not choices.is_sinusoidal:
            self.weights["positions"] = self._random(choices.first_row + LENGTH, HIDDEN)
        for layer in range(LAYERS):
            for name in ("norm1", "norm2"):
                self._add_norm(f"{layer}.{name}")
            for name in "qkvo":
                self._add_linear(f"{layer}.{name}", HIDDEN, HIDDEN)
            if layer in choices.moe_layers:
                self.weights[f"{layer}.gate"] = self._random(EXPERTS, HIDDEN)
                for expert in range(EXPERTS):
                    self._add_linear(f"{layer}.{expert}.up", HIDDEN, WIDTH)
                    self._add_linear(f"{layer}.{expert}.down", WIDTH, HIDDEN)
            else:
                self._add_linear(f"{layer}.up", HIDDEN, choices.dense_width)
                self._add_linear(f"{layer}.down", choices.dense_width, HIDDEN)
        self._add_norm("norm")
        if not choices.is_tied:
            self.weights["head"] = self._random(VOCAB, HIDDEN)

    def __call__(self, token_ids: torch.Tensor) -> SimpleNamespace:
        """Return the logits of sequences. Shapes: [N, T] -> [N, T, V]."""
        return SimpleNamespace(logits=torch.stack([self._logits(ids) for ids in token_ids]))

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.weights["tokens"][ids] * self.choices.token_scale + self._positions(len(ids))
        for layer in range(LAYERS):
            hidden = hidden + self._attention(layer, self._norm(f"{layer}.norm1", hidden))
            hidden = hidden + self._network(layer, self._norm(f"{layer}.norm2", hidden))
        head = self.weights.get("head", self.weights["tokens"])
        return self._norm("norm", hidden) @ head.T

    def in_bfloat16(self) -> PlainGPT:
        """Return the same model in bfloat16."""
        model = copy.copy(self)
        model.weights = {name: weight.bfloat16() for name, weight in self.weights.items()}
        return model

    @property
    def num_parameters(self) -> int:
        """Weights but norms and biases, experts' biases included."""
        return sum(
            weight.numel()
            for name, weight in self.weights.items()
            if weight.dim() > 1 or (name.endswith(".bias") and name.count(".") == 3)
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape) * 0.15

    def _add_linear(self, name: str, inputs: int, outputs: int) -> None:
        self.weights[name], self.weights[f"{name}.bias"] = self._random(outputs, inputs), self._random(outputs)

    def _add_norm(self, name: str) -> None:
        self.weights[name], self.weights[f"{name}.bias"] = 1 + 2 * self._random(HIDDEN), self._random(HIDDEN)

    def _positions(self, count: int) -> torch.Tensor:
        first = self.choices.first_row
        if not self.choices.is_sinusoidal:
            return self.weights["positions"][first : first + count]
        rows = []
        for position in range(first, first + count):
            angles = [position * math.exp(-i * math.log(10000) / (HIDDEN // 2 - 1)) for i in range(HIDDEN // 2)]
            rows.append([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
        return torch.tensor(rows).to(self.weights["tokens"].dtype)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[name].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[name] + self.weights[f"{name}.bias"]

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._linear(f"{layer}.{name}", x).view(len(x), HEADS, -1).transpose(0, 1) for name in "qkv")
        scores = q @ k.transpose(1, 2) / math.sqrt(HIDDEN // HEADS)
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, -math.inf).softmax(-1)
        return self._linear(f"{layer}.o", (weights @ v).transpose(0, 1).reshape(len(x), HIDDEN))

    def _network(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer not in self.choices.moe_layers:
            return self._feed_forward(str(layer), x)
        gates = (x @ self.weights[f"{layer}.gate"].T).softmax(-1)
        rows = []
        for token, gate in zip(x, gates, strict=True):
            experts = gate.argsort(descending=True)[: self.choices.top_k].tolist()
            total = gate[experts].sum() if self.choices.top_k > 1 else 1.0
            rows.append(sum(gate[e] / total * self._feed_forward(f"{layer}.{e}", token) for e in experts))
        return torch.stack(rows)

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        up = self._linear(f"{name}.up", x)
        kind = self.choices.activation
        units = F.relu(up) if kind == "relu" else F.gelu(up, approximate="tanh" if kind == "tanh" else "none")
        return self._linear(f"{name}.down", units)


class PlainParity(Parity):
    """Tests of a family with `PlainGPT` for an oracle."""

    @staticmethod
    def in_bfloat16(pair):
        return pair.theirs.in_bfloat16()

    def test_parameters_are_counted(self, pair):
        assert pair.ours.config.num_parameters == pair.theirs.num_parameters

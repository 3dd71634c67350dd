"""A trainable Switch Transformer encoder with a linear layer over the mean of its hidden states.

It equals `SwitchTransformersEncoderModel` of transformers, with the same names of weights, no dropped tokens and no
router jitter. It is faster: only attention is padded, and one sort distributes the tokens to the experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

NUM_BUCKETS: Final = 32  # of relative positions, in both directions
MAX_DISTANCE: Final = 128  # tokens; greater distances share the last bucket
EPSILON: Final = 1e-6  # of RMS norms


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierShape:
    """Sizes of a classifier."""

    hidden_size: int
    num_layers: int
    num_sparse_layers: int  # every (num_layers / num_sparse_layers)-th layer has experts, from the second on
    num_experts: int
    num_heads: int
    head_dim: int
    ffn_size: int  # of an expert, and of a layer without experts
    num_classes: int

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts, by transformers' rule."""
        step = self.num_layers // self.num_sparse_layers
        return step == 1 or layer % step == 1


@dataclass(frozen=True, slots=True)
class Routed:
    """A router's results. Shapes: inputs [N, H]; logits [N, E]; probabilities [N, E]; experts [N] int64."""

    inputs: Tensor
    logits: Tensor
    probabilities: Tensor
    experts: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Routed]) -> Routed:
        """Return the results of several passes as one."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def balance_loss(self) -> Tensor:
        """Return the load-balancing loss, 1 for equal loads (2101.03961, equation 4, without alpha)."""
        num_experts = self.logits.shape[1]
        shares = torch.bincount(self.experts, minlength=num_experts) / len(self.experts)
        return num_experts * (shares * self.probabilities.mean(dim=0)).sum()

    def z_loss(self) -> Tensor:
        """Return the mean squared logsumexp of the logits, which keeps them small (ST-MoE, 2202.08906, equation 5)."""
        return self.logits.logsumexp(dim=1).square().mean()


class SwitchClassifier(nn.Module):
    """The network. Token ids are rows of its own table, which has only the tokens that occur."""

    def __init__(self, shape: ClassifierShape, embeddings: Tensor, dropout: float) -> None:
        """Shapes: embeddings [v, H] float32. Weights are initialized as in T5, routers near 0."""
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(len(embeddings), shape.hidden_size, _weight=embeddings.clone())
        self.encoder = _Encoder(shape, dropout)
        self.score = nn.Linear(shape.hidden_size, shape.num_classes)
        self._dropout = nn.Dropout(dropout)
        nn.init.normal_(self.score.weight, std=shape.hidden_size**-0.5)
        nn.init.zeros_(self.score.bias)

    def forward(self, texts: Sequence[Tensor]) -> tuple[Tensor, list[Routed]]:
        """Return logits [texts, classes], and each router's results for the tokens of all texts."""
        lengths = torch.tensor([len(text) for text in texts])
        is_there = torch.arange(int(lengths.max())) < lengths[:, None]
        hidden, routed = self.encoder(self._dropout(self.embed(torch.cat(list(texts)))), is_there)
        hidden = self._dropout(hidden)
        means = torch.stack([part.mean(dim=0) for part in torch.split(hidden, lengths.tolist())])
        logits: Tensor = self.score(means)
        return logits, routed


class _Encoder(nn.Module):
    """All layers and the last norm."""

    def __init__(self, shape: ClassifierShape, dropout: float) -> None:
        super().__init__()
        self._blocks = [_Block(shape, layer, dropout) for layer in range(shape.num_layers)]
        self.block = nn.ModuleList(self._blocks)
        self.final_layer_norm = _norm(shape)

    def forward(self, hidden: Tensor, is_there: Tensor) -> tuple[Tensor, list[Routed]]:
        bias = self._blocks[0].attention[0].position_bias(is_there.shape[1])
        bias = bias.masked_fill(~is_there[:, None, None, :], -math.inf)
        routed = []
        for block in self._blocks:
            hidden, found = block(hidden, is_there, bias)
            routed += [found] if found is not None else []
        return self.final_layer_norm(hidden), routed


class _Block(nn.Module):
    """Attention, then a feed-forward block, in transformers' nesting."""

    def __init__(self, shape: ClassifierShape, layer: int, dropout: float) -> None:
        super().__init__()
        self.attention = (_Attention(shape, has_bias=layer == 0), _norm(shape))
        self.network = (_SparseMLP(shape) if shape.is_sparse(layer) else _Expert(shape), _norm(shape))
        parts = {"SelfAttention": self.attention, "mlp": self.network}.items()
        self.layer = nn.ModuleList([nn.ModuleDict({name: part, "layer_norm": norm}) for name, (part, norm) in parts])
        self._dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, is_there: Tensor, bias: Tensor) -> tuple[Tensor, Routed | None]:
        (attention, norm), (network, network_norm) = self.attention, self.network
        hidden = hidden + self._dropout(attention(norm(hidden), is_there, bias))
        added, routed = network(network_norm(hidden))
        return hidden + self._dropout(added), routed


class _Attention(nn.Module):
    """Both directions, with relative position biases; scores are not scaled (T5)."""

    def __init__(self, shape: ClassifierShape, *, has_bias: bool) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.num_heads * shape.head_dim
        self._heads = (shape.num_heads, shape.head_dim)
        self.q = _linear(size, inner, (size * shape.head_dim) ** -0.5)
        self.k = _linear(size, inner, size**-0.5)
        self.v = _linear(size, inner, size**-0.5)
        self.o = _linear(inner, size, inner**-0.5)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, shape.num_heads)
            nn.init.normal_(self.relative_attention_bias.weight, std=size**-0.5)

    def position_bias(self, num_tokens: int) -> Tensor:
        """Return biases by distance. Shapes: -> [1, heads, T, T]."""
        positions = torch.arange(num_tokens)
        biases: Tensor = self.relative_attention_bias(position_buckets(positions[None] - positions[:, None]))
        return biases.permute(2, 0, 1)[None]

    def forward(self, hidden: Tensor, is_there: Tensor, bias: Tensor) -> Tensor:
        lengths = is_there.sum(dim=1).tolist()
        q, k, v = (
            pad_sequence(list(torch.split(of(hidden), lengths)), batch_first=True) for of in (self.q, self.k, self.v)
        )
        q, k, v = (part.view(*part.shape[:2], *self._heads).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        output: Tensor = self.o(attended.transpose(1, 2).flatten(2)[is_there])
        return output


class _Expert(nn.Module):
    """wo(relu(wi(x))), and no routing."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.wi = _linear(shape.hidden_size, shape.ffn_size, shape.hidden_size**-0.5)
        self.wo = _linear(shape.ffn_size, shape.hidden_size, shape.ffn_size**-0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.wo(F.relu(self.wi(hidden))), None


class _SparseMLP(nn.Module):
    """A router with one expert for each token. The router's probability scales the expert's output."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        classifier = _linear(shape.hidden_size, shape.num_experts, 0.1 * shape.hidden_size**-0.5)
        self.router = nn.ModuleDict({"classifier": classifier})
        self.experts = nn.ModuleDict({f"expert_{expert}": _Expert(shape) for expert in range(shape.num_experts)})

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routed]:
        logits = self.router["classifier"](hidden)
        probabilities = logits.softmax(dim=1)
        chosen, experts = probabilities.max(dim=1)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(self.experts)).tolist()
        parts = torch.split(hidden[order], counts)
        outputs = [self.experts[f"expert_{at}"](part)[0] for at, part in enumerate(parts) if len(part)]
        output = torch.cat(outputs)[order.argsort()] * chosen[:, None]
        return output, Routed(hidden.detach(), logits, probabilities, experts)


def position_buckets(distances: Tensor) -> Tensor:
    """Return the bucket of each relative position (T5, both directions): exact if near, logarithmic if far."""
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    far = distances.abs()
    logs = torch.log(far.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
    large = (exact + logs.long()).clamp(max=half - 1)
    return (distances > 0).long() * half + torch.where(far < exact, far, large)


def _norm(shape: ClassifierShape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden_size, eps=EPSILON)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=std)
    return linear

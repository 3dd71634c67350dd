"""The network: token embeddings in, logits over the experts of every layer out, of the same token.

Compress, two layers of LSTM, self-attention with SparseMax weights, a residual connection, and a head a layer (SiDA,
2310.18859, section 3.2). For encoders, whose inputs are known as a whole, attention sees all of it. For decoders all is
causal, and attention sees a bounded number of tokens. So a further token costs the same for any length of its text: the
past is a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moeflow.models.expert_predictor.sparsemax import sparsemax

LSTM_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorShape:
    """Sizes of a predictor, and of the model that it is for."""

    embedding_size: int  # of the model's tokens
    num_layers: int  # of the model, those with experts
    num_experts: int  # of a layer
    top_k: int  # experts of a token
    hidden_size: int = 256
    window: int = 256  # tokens that attention sees, the newest included, if it
    is_causal: bool = True
    has_direct: bool = False  # whether heads see the token's embedding as well; published: they do not


@dataclass(frozen=True, slots=True)
class PredictorState:
    """The state of a text. Shapes: hidden and cell [2, D]; keys and values [fewer than `window`, D]."""

    hidden: Tensor
    cell: Tensor
    keys: Tensor
    values: Tensor


class ExpertPredictor(nn.Module):
    """Predicts, from the tokens so far, which experts the last of them needs in all layers."""

    def __init__(self, shape: PredictorShape) -> None:
        super().__init__()
        self.shape, size = shape, shape.hidden_size
        self.compress = nn.Linear(shape.embedding_size, size)
        self.lstm = nn.LSTM(size, size, LSTM_LAYERS, batch_first=True)
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.heads = nn.Linear(size, shape.num_layers * shape.num_experts)
        if shape.has_direct:
            self.direct = nn.Linear(shape.embedding_size, shape.num_layers * shape.num_experts, bias=False)
            nn.init.zeros_(self.direct.weight)

    def forward(self, embeddings: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits of whole texts; `lengths` [B] of padded texts; None: all are full.

        Shapes: embeddings [B, T, H] -> [B, T, layers, E].
        """
        if self.shape.is_causal:
            return self.go_on(embeddings, [self.begin() for _ in embeddings])[0]
        num_texts, num_tokens, _ = embeddings.shape
        zeros = embeddings.new_zeros(LSTM_LAYERS, num_texts, self.shape.hidden_size)
        normed = _normed(embeddings)
        outputs, _ = self._recurrent(self._product("compress", normed), (zeros, zeros))
        is_seen = torch.ones(num_texts, 1, num_tokens, dtype=torch.bool)
        if lengths is not None:
            is_seen = torch.arange(num_tokens) < lengths[:, None, None]
        return self._logits(normed, outputs, self._product("key", outputs), self._product("value", outputs), is_seen)

    def begin(self) -> PredictorState:
        """Return the state before the first token."""
        zeros = torch.zeros(LSTM_LAYERS, self.shape.hidden_size)
        return PredictorState(zeros, zeros, zeros[:0], zeros[:0])

    def go_on(self, embeddings: Tensor, states: Sequence[PredictorState]) -> tuple[Tensor, list[PredictorState]]:
        """Return logits of the next tokens of some texts, and the states after them.

        Shapes: embeddings [B, T, H], of as many tokens each -> [B, T, layers, E].
        """
        num_tokens = embeddings.shape[1]
        normed = _normed(embeddings)
        before = tuple(torch.stack([getattr(state, name) for state in states], dim=1) for name in ("hidden", "cell"))
        outputs, (hidden, cell) = self._recurrent(self._product("compress", normed), before)
        keys, num_past = _with_past([state.keys for state in states], self._product("key", outputs))
        values, _ = _with_past([state.values for state in states], self._product("value", outputs))
        logits = self._logits(normed, outputs, keys, values, self._is_seen(num_past, num_tokens))
        after = [
            PredictorState(hidden[:, text], cell[:, text], *self._kept(keys[text], values[text], num, num_tokens))
            for text, num in enumerate(num_past)
        ]
        return logits, after

    def _product(self, name: str, inputs: Tensor) -> Tensor:
        """Return what a linear layer makes of its inputs. Shapes: inputs [B, T, its inputs] -> [B, T, its outputs]."""
        outputs: Tensor = getattr(self, name)(inputs)
        return outputs

    def _recurrent(self, inputs: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the LSTM makes of its inputs, and its states (hidden, cell) behind them.

        Shapes: inputs [B, T, D], states [2, B, D] each -> [B, T, D].
        """
        outputs, after = self.lstm(inputs, before)
        return outputs, after

    def _logits(self, normed: Tensor, outputs: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor) -> Tensor:
        """Attend, and ask the heads.

        Shapes: normed [B, T, H], outputs [B, T, D], keys and values [B, S, D], is_seen [B or 1, T or 1, S]
        -> [B, T, layers, E].
        """
        scores = self._product("query", outputs) @ keys.transpose(1, 2) / math.sqrt(self.shape.hidden_size)
        attended = sparsemax(scores.masked_fill(~is_seen, -math.inf)) @ values
        logits = self._product("heads", outputs + attended)
        if self.shape.has_direct:
            logits = logits + self._product("direct", normed)
        return logits.view(*outputs.shape[:2], self.shape.num_layers, self.shape.num_experts)

    def _is_seen(self, num_past: Sequence[int], num_tokens: int) -> Tensor:
        """Return which keys a token sees: its own, and those before it in the window. Shapes: -> [B, T, past + T]."""
        most = max(num_past)
        places = torch.arange(-most, num_tokens)
        distance = torch.arange(num_tokens)[:, None] - places
        is_near = (distance >= 0) & (distance < self.shape.window)
        return is_near & (places >= -torch.tensor(num_past)[:, None, None])

    def _kept(self, keys: Tensor, values: Tensor, num_past: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        num_kept = min(num_past + num_tokens, self.shape.window - 1)
        start = len(keys) - num_kept
        return keys[start:].clone(), values[start:].clone()


def _normed(embeddings: Tensor) -> Tensor:
    """Return embeddings of size 1, as those of models differ by orders of magnitude. Shapes: [..., H] -> [..., H]."""
    return F.rms_norm(embeddings, embeddings.shape[-1:])


def _with_past(past: Sequence[Tensor], new: Tensor) -> tuple[Tensor, list[int]]:
    """Return rows of the past, behind as many of zeros as make them equally long, and new ones; and how many are past.

    Shapes: past [P, D] each; new [B, T, D] -> [B, most + T, D].
    """
    lengths = [len(rows) for rows in past]
    most = max(lengths)
    if not most:
        return new, lengths
    padded = torch.stack([F.pad(rows, (0, 0, most - len(rows), 0)) for rows in past])
    return torch.cat([padded, new], dim=1), lengths

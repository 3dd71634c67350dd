"""Learns the importance of each input of a model's matrices from text: see `models/importance.py`.

All text passes through one layer, then through the next. Memory holds one layer, and the checkpoint is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.units import format_bytes
from moeflow.kernels.activation import activate
from moeflow.kernels.linear import linear
from moeflow.models.importance import Importance, load_importance, save_importance
from moeflow.models.layers.allocation.tensors import TensorAllocator
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.expert_weights import ExpertTensors
from moeflow.models.layers.mlp import MLP
from moeflow.models.layers.moe import MoE, expert_kind
from moeflow.models.loading import load_causal_lm
from moeflow.models.registry import read_model_config
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.known_importance import importance_place
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import sequences_context
from moeflow.train.calibration_text import calibration_text
from moeflow.train.phases import OnDone

Floats = NDArray[np.float32]

SEQUENCE_TOKENS: Final = 512
TOKENS_PER_TEXT: Final = 1024  # of each text of the package
_PASS_SEQUENCES: Final = 8
_PRIOR_TOKENS: Final = 16  # weight of the mean over all experts in that of one
_MIN_SHARE: Final = 0.01  # of the mean, since other text may use any input


def ensure_importance(
    model: str, cache_dir: Path | None, num_threads: int | None, on_done: OnDone = lambda *_: None
) -> Importance:
    """Return the importance of a model's inputs from the cache, or learn and store it.

    Blocks: as `learn_importance`. Raises: CheckpointError, also if there is no tokenizer; as `learn_importance`.
    """
    with closing(open_checkpoint(model)) as checkpoint:
        file = importance_place(checkpoint, cache_dir)
        known = load_importance(file)
        if known is None:
            texts = importance_text(Tokenizer.load(model))
            known = learn_importance(checkpoint, texts, num_threads=num_threads or 1, on_done=on_done)
            save_importance(known, file)
    return known


def importance_text(tokenizer: Tokenizer) -> list[list[int]]:
    """Return sequences of tokens from the beginnings of the package's texts."""
    texts = calibration_text(tokenizer.encode).fitting
    starts = range(0, TOKENS_PER_TEXT, SEQUENCE_TOKENS)
    return [piece for text in texts for start in starts if (piece := text[start : start + SEQUENCE_TOKENS])]


def learn_importance(
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    num_threads: int = 1,
    on_done: OnDone = lambda *_: None,
) -> Importance:
    """Return the importance of each input of every layer's matrices, and of the output projection.

    `texts` are token ids, no sequence empty. Blocks: for a pass over all of them, and for reading the checkpoint.
    Raises: CheckpointError; ConfigError if the model is not decoder-only; CapacityError if memory holds no layer.
    """
    shape = read_model_config(checkpoint)
    if shape.encoder is not None:
        raise ConfigError(f"{checkpoint.path} is an encoder-decoder; importance needs a decoder-only model")
    if shape.embeddings.layer_embeddings is not None or shape.kv_layers != shape.attention_layers:
        raise ConfigError(
            f"{checkpoint.path} has layers with shared keys and values or own inputs; importance needs independent "
            "layers"
        )
    _check_memory(checkpoint)
    passes = [texts[start : start + _PASS_SEQUENCES] for start in range(0, len(texts), _PASS_SEQUENCES)]
    num_steps, found = shape.num_layers * len(passes), dict[str, Floats]()
    ends = _stage(checkpoint, 0, num_threads)
    hidden = [_embedded(ends, part) for part in passes]
    for layer_idx in range(shape.num_layers):
        stage = _stage(checkpoint, layer_idx, num_threads) if layer_idx else ends
        (layer,) = stage.layers
        sums = _LayerSums(layer, f"model.layers.{layer_idx}")
        for number, part in enumerate(passes):
            context = sequences_context(stage, [len(text) for text in part])
            hidden[number] = sums.run(hidden[number], stage, context)
            on_done(layer_idx * len(passes) + number + 1, num_steps)
        found |= sums.importance()
    last = _Sums()
    for states in hidden:
        last.add(ends.norm(states))
    head = "model.embed_tokens.weight" if shape.embeddings.tie_word_embeddings else "lm_head.weight"
    return found | {head: last.whole()}


def _embedded(ends: CausalLM, texts: Sequence[Sequence[int]]) -> Tensor:
    positions = list(chain(*(range(len(text)) for text in texts)))
    return ends.embed_at(torch.tensor(list(chain(*texts))), torch.tensor(positions))


def _stage(checkpoint: Checkpoint, layer_idx: int, num_threads: int) -> CausalLM:
    allocator = TensorAllocator(torch.float32, torch.device("cpu"), own_layers=range(layer_idx, layer_idx + 1))
    return load_causal_lm(checkpoint, allocator, num_threads=num_threads)


def _check_memory(checkpoint: Checkpoint) -> None:
    layers: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        place = ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else "ends"
        layers[place] = layers.get(place, 0) + 4 * math.prod(info.shape)
    need_bytes, have_bytes = layers.pop("ends", 0) + max(layers.values(), default=0), host_resources().available_bytes
    if need_bytes > have_bytes:
        raise CapacityError(
            f"not enough memory for a layer of {checkpoint.path}: need {format_bytes(need_bytes)}, have "
            f"{format_bytes(have_bytes)}. Close other programs"
        )


class _Sums:
    """Sums of squared inputs over tokens, one for each of several networks."""

    def __init__(self, number: int = 1) -> None:
        self._squares = [torch.zeros(1, dtype=torch.float64)] * number
        self._num_tokens = [0] * number

    def add(self, x: Tensor, place: int = 0) -> None:
        """Shapes: x [T, H]."""
        self._squares[place] = self._squares[place] + x.double().square().sum(dim=0)
        self._num_tokens[place] += len(x)

    def whole(self) -> Floats:
        """Return the importance over all networks."""
        return _scaled(self._mean())

    def each(self) -> list[Floats]:
        """Return each network's importance, drawn to that over all, the closer the fewer tokens it had."""
        prior = _PRIOR_TOKENS * self._mean()
        pairs = zip(self._squares, self._num_tokens, strict=True)
        return [_scaled((squares + prior) / (num_tokens + _PRIOR_TOKENS)) for squares, num_tokens in pairs]

    def _mean(self) -> Tensor:
        return sum(self._squares[1:], self._squares[0]) / max(sum(self._num_tokens), 1)


def _scaled(mean: Tensor) -> Floats:
    """Return means above zero and about 1."""
    middle = mean.mean().clamp(min=torch.finfo(torch.float32).tiny)
    scaled: Floats = (mean / middle + _MIN_SHARE).float().numpy()
    return scaled


class _LayerSums:
    """Sums over the inputs of one layer's matrices."""

    def __init__(self, layer: DecoderLayer, prefix: str) -> None:
        self._layer = layer
        self._prefix = prefix
        num_networks = layer.mlp.config.routing.num_experts if isinstance(layer.mlp, MoE) else 1
        self._qkv, self._o, self._shared_up, self._shared_down = (_Sums() for _ in range(4))
        self._ups, self._downs = _Sums(num_networks), _Sums(num_networks)

    @torch.inference_mode()
    def run(self, hidden: Tensor, stage: CausalLM, context: ForwardContext) -> Tensor:
        """Return the output of the layer. Shapes: hidden [T, H] -> [T, H]."""
        layer, rotary = self._layer, stage.rotary(context.positions, hidden.dtype)
        self._qkv.add(layer.input_layernorm(hidden))
        attended = layer.attention(layer.pre_attention(hidden), rotary, context)
        self._o.add(attended)
        hidden = layer.after_attention(hidden, attended)
        normed, mlp = layer.post_attention_layernorm(hidden), layer.mlp
        if isinstance(mlp, MLP):
            units = mlp.units(normed)
            self._ups.add(normed)
            self._downs.add(units)
            return layer.add_network(hidden, mlp.down_proj(units))
        assert isinstance(mlp, MoE)
        return layer.add_network(hidden, self._experts(mlp, normed))

    def _experts(self, mlp: MoE, normed: Tensor) -> Tensor:
        weights, kind = mlp.weights, expert_kind(mlp.config)
        assert isinstance(weights, ExpertTensors)
        shared = None
        if mlp.shared is not None:
            assert isinstance(mlp.shared.network, MLP)
            x = mlp.network_input(normed)
            self._shared_up.add(x)
            self._shared_down.add(mlp.shared.network.units(x))
            shared = mlp.shared(x, None)
        chosen, inputs = torch.zeros_like(normed), mlp.expert_input(normed)
        up_biases, down_biases = weights.biases or (None, None)
        topk_ids, topk_weights = mlp.route(normed)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
            x = inputs[rows]
            ups = linear(x, weights.gate_up[expert], None if up_biases is None else up_biases[expert])
            units = activate(kind.function, ups, is_gated=kind.is_gated)
            self._ups.add(x, expert)
            self._downs.add(units, expert)
            out = linear(units, weights.down[expert], None if down_biases is None else down_biases[expert])
            chosen.index_add_(0, rows, out * topk_weights[rows, choices].unsqueeze(1))
        return mlp.joined(shared, chosen)

    def importance(self) -> dict[str, Floats]:
        """Return the importance of each of the layer's matrices."""
        layer, names, found = self._layer, self._layer.matrix_names(self._prefix), dict[str, Floats]()
        attention = layer.self_attn
        for sums, parts in (
            (self._qkv, attention.qkv_proj.parts),
            (self._o, attention.o_proj.parts),
            (self._shared_up, ["shared_up"]),
            (self._shared_down, ["shared_down"]),
        ):
            whole = sums.whole()
            found |= {name: whole for part in parts for name in names.get(part, [])}
        importances = zip(self._networks(), self._ups.each(), self._downs.each(), strict=True)
        for (ups, down), up, of_down in importances:
            found |= {name: up for name in ups} | {down: of_down}
        return found

    def _networks(self) -> Iterator[tuple[list[str], str]]:
        """Yield the names of each network's gate and up, and of its down."""
        mlp = self._layer.mlp
        if isinstance(mlp, MoE):
            for expert in range(mlp.config.routing.num_experts):
                *ups, down = mlp.expert_names(self._prefix, expert)
                yield ups, down
        else:
            ups, (down,) = mlp.matrix_names(self._prefix)
            yield ups, down

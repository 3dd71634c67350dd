"""A whole Switch Transformer on a rank, whose layers with experts are those of a study's layout.

All layers with experts read the same memory. Attention, norms and dense layers have random weights of their own, and a
rank runs them over its own sequences (data parallelism). Times are wall time; no barrier separates sections.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kv.storage import KVStorage
from moeflow.models.families import switch_transformers
from moeflow.models.layers.allocation.expert_homes import PackedSpec
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.expert_weights import ExpertWeights
from moeflow.models.pass_input import PassInput
from moeflow.parallel.group import Group
from studies.parallel.case import Case, LayerShape, Tokens
from studies.parallel.layouts import RankLayout, make_layout
from studies.parallel.meter import Meter, WallMeter
from studies.parallel.result import Result
from studies.parallel.shared_weights import SharedWeights

BLOCK: Final = 16  # tokens of a KV block
HEAD_DIM: Final = 64
VOCABULARY: Final = 256
SCALE: Final = 0.02  # of weights


class ModelTask(msgspec.Struct, frozen=True, tag=True):
    """Encode a batch, then decode some steps."""

    case: Case  # of the encoder's pass; its numbers of tokens are those of whole sequences
    layout: str
    num_layers: int  # of the encoder, and of the decoder if there is one; every second has experts
    sequence_tokens: int
    num_steps: int  # of the decoder; 0: an encoder alone
    router: Literal["skewed", "own"]  # by chance, as the case has it, or the layer's own
    is_checked: bool  # whether to compare the encoder's states with those of all experts in this process

    @property
    def num_sequences(self) -> tuple[int, ...]:
        """Sequences of each rank."""
        return tuple(tokens // self.sequence_tokens for tokens in self.case.num_tokens)

    @property
    def step_case(self) -> Case:
        """A decoder's step: a token of each sequence."""
        return msgspec.structs.replace(self.case, num_tokens=self.num_sequences)


class LayerTimes(msgspec.Struct, frozen=True):
    """A layer with experts, of one pass."""

    wall_s: float
    processor_s: float  # of this rank's thread: what counts where other work shares the cores
    sections: dict[str, float]  # wall time


class PassTimes(msgspec.Struct, frozen=True):
    """Passes as a rank measured them."""

    wall_s: float  # from when all ranks began to when all were through
    processor_s: float


class ModelRun(msgspec.Struct, frozen=True):
    """What a rank measured."""

    encode: PassTimes
    decode: PassTimes  # all steps
    encoder: list[LayerTimes]
    decoder: list[list[LayerTimes]]  # of each step
    error: float | None = None  # largest difference of states, over the largest value; None: not checked

    def without_sections(self) -> ModelRun:
        """Return the times of whole layers."""
        encoder, *decoder = (
            [LayerTimes(it.wall_s, it.processor_s, {}) for it in layers] for layers in (self.encoder, *self.decoder)
        )
        return ModelRun(self.encode, self.decode, encoder, decoder, self.error)


@dataclass(slots=True)
class _Pass:
    """A pass that runs now."""

    layout: RankLayout
    tokens: Tokens  # of the router by chance
    times: list[LayerTimes] = field(default_factory=list)


class WholeModel:
    """A rank's model. The layout of a pass computes its experts."""

    def __init__(self, layer: LayerShape, num_layers: int, *, has_decoder: bool, group: Group) -> None:
        """Fill the model with random weights, the same on all ranks."""
        self._group = group
        shape = _shape(layer, num_layers, has_decoder=has_decoder)
        formats = WeightFormats(layer.weights, layer.weights)
        allocator = PackedAllocator(torch.float32, torch.device("cpu"), formats, home=_Home(self))
        self._model = switch_transformers.build(shape, allocator)
        random = torch.Generator().manual_seed(0)
        for name, destination in self._model.named_weights():
            _fill(name, destination, random)
        self._blocks = [block for _, block in self._model.moe_blocks()]
        self._pass: _Pass | None = None

    @torch.inference_mode()
    def run(self, task: ModelTask, shared: SharedWeights) -> ModelRun:
        """Run a batch. Blocks: until the other ranks are through, too. Raises: GroupError."""
        rank = self._group.rank
        for block in self._blocks:
            block.given = self._given if task.router == "skewed" else None
        number, length = task.num_sequences[rank], task.sequence_tokens
        begin = -(-length // BLOCK) * BLOCK if task.num_steps else length
        blocks_each = -(-(begin + task.num_steps) // BLOCK)
        block_ids = [tuple(range(at * blocks_each, (at + 1) * blocks_each)) for at in range(number)]
        kv = KVStorage(
            layers=self._model.config.kv_layers,
            num_blocks=number * blocks_each,
            block_size=BLOCK,
            num_kv_heads=self._model.config.attention.num_kv_heads,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
        )

        def given(start: int, num_tokens: int) -> PassInput:
            ids = [(7 * place + rank) % VOCABULARY for place in range(number * num_tokens)]
            return PassInput(
                ids, [start] * number, [num_tokens] * number, block_ids, [], num_encoder_tokens=[length] * number
            )

        def encode(layout: RankLayout) -> tuple[Tensor, PassTimes, list[LayerTimes]]:
            return self._timed(given(0, begin), layout, task.case, kv)

        layout = make_layout(task.layout, task.case, shared, rank)
        hidden, encode_times, encoder = encode(layout)
        error = None
        if task.is_checked:
            expected, *_ = encode(_Alone(shared.whole(list(range(task.case.layer.num_experts)))))
            error = float((hidden - expected).abs().max() / expected.abs().max())
        layout = make_layout(task.layout, task.step_case, shared, rank)
        steps, decoder = [], []
        for step in range(task.num_steps):
            _, step_times, times = self._timed(given(begin + step, 1), layout, task.step_case, kv)
            steps.append(step_times)
            decoder.append(times)
        decode_times = PassTimes(sum(it.wall_s for it in steps), sum(it.processor_s for it in steps))
        return ModelRun(encode_times, decode_times, encoder, decoder, error)

    def experts(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return what the layout of this pass makes of a layer's tokens."""
        assert self._pass is not None
        meter = WallMeter(self._group)
        start_s, start_processor_s = time.perf_counter(), time.thread_time()
        result = self._pass.layout.run(Tokens(hidden, topk_ids, topk_weights), meter)
        wall_s, processor_s = time.perf_counter() - start_s, time.thread_time() - start_processor_s
        sections = {name: round(it, 6) for name, it in meter.seconds.items()}
        self._pass.times.append(LayerTimes(round(wall_s, 6), round(processor_s, 6), sections))
        return result.sums

    def _given(self) -> tuple[Tensor, Tensor]:
        assert self._pass is not None
        return self._pass.tokens.topk_ids, self._pass.tokens.topk_weights

    def _timed(
        self, given: PassInput, layout: RankLayout, case: Case, kv: KVStorage
    ) -> tuple[Tensor, PassTimes, list[LayerTimes]]:
        token_ids, context = given.tensors(kv, torch.device("cpu"))
        self._pass = _Pass(layout, case.tokens(self._group.rank))
        self._group.barrier("begin")
        start_s, start_processor_s = time.perf_counter(), time.thread_time()
        hidden = self._model(token_ids, context)
        processor_s = time.thread_time() - start_processor_s
        self._group.barrier("end")
        return hidden, PassTimes(time.perf_counter() - start_s, processor_s), self._pass.times


class _Alone:
    """All experts in this process, with no exchange."""

    def __init__(self, everything: PackedExperts) -> None:
        self._everything = everything

    def run(self, tokens: Tokens, meter: Meter) -> Result:
        """See `RankLayout`."""
        return Result(self._everything.compute(tokens.x, tokens.topk_ids, tokens.topk_weights))


class _LayoutExperts(ExpertWeights):
    def __init__(self, model: WholeModel) -> None:
        self._model = model

    def compute(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None) -> Tensor:
        sums = self._model.experts(hidden, topk_ids, topk_weights)
        return sums if residual is None else sums + residual


class _Home:
    def __init__(self, model: WholeModel) -> None:
        self._model = model

    def place(self, experts: PackedSpec) -> ExpertWeights:
        return _LayoutExperts(self._model)


def _shape(layer: LayerShape, num_layers: int, *, has_decoder: bool) -> ModelConfig:
    kind = "ForConditionalGeneration" if has_decoder else "EncoderModel"
    fields = {
        "architectures": [f"SwitchTransformers{kind}"],
        "vocab_size": VOCABULARY,
        "d_model": layer.hidden,
        "d_kv": HEAD_DIM,
        "d_ff": layer.width,
        "num_heads": max(layer.hidden // HEAD_DIM, 1),
        "num_layers": num_layers,
        "num_sparse_encoder_layers": num_layers // 2,
        "num_sparse_decoder_layers": num_layers // 2,
        "num_experts": layer.num_experts,
        "decoder_start_token_id": 0,
    }
    return switch_transformers.read_config(ConfigReader(fields, "the study's model"))


def _fill(name: str, destination: object, random: torch.Generator) -> None:
    shape: Sequence[int] = destination.shape  # type: ignore[attr-defined]
    values = torch.randn(tuple(shape), generator=random) * SCALE + ("norm" in name)
    if isinstance(destination, PackedRows):
        destination.fill(values, np.arange(len(values)) + destination.first)
    else:
        assert isinstance(destination, Tensor)
        destination.copy_(values)

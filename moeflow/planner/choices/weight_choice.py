"""In which format an engine keeps its weights. Only headers are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from moeflow.checkpoint.checkpoint import Checkpoint, TensorInfo
from moeflow.core.errors import ConfigError
from moeflow.kernels.weight_format import (
    ALL_FORMATS,
    BITS_PER_VALUE,
    DTYPES,
    FORMATS,
    QUANTIZED,
    WEIGHT_FORMATS,
    LayerFormats,
    WeightFormat,
)
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.weight_allocator import WeightFormats
from moeflow.models.loading import NamesApart, names_apart
from moeflow.planner.settings import Settings


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The formats of matrices, of embeddings (with the output projection) and of routers, and why these."""

    matrices: WeightFormat
    embeddings: WeightFormat
    reason: str = ""  # empty if the user said so
    is_exact: bool = False  # nothing is rounded that the file does not round: neither weights nor what they meet
    routers: WeightFormat = "float32"
    head: WeightFormat | None = None  # of the output projection; None: as embeddings
    layers: tuple[LayerFormats, ...] = ()  # of each layer's matrices, most being in `matrices`; empty: all are

    @property
    def formats(self) -> WeightFormats:
        """How weights are packed."""
        return WeightFormats(
            self.matrices,
            self.embeddings,
            self.routers,
            is_wide=self.is_exact,
            head=self.head,
            layers=self.layers,
        )

    def with_routers(self, checkpoint: Checkpoint) -> WeightChoice:
        """Return the same with routers as a checkpoint has them: bfloat16 if they and all else are, else float32."""
        names = names_apart(checkpoint).routers
        has_narrow = all(checkpoint.tensors[name].stored_as == "bfloat16" for name in names)
        is_narrow = self.matrices == "bfloat16" and not self.layers
        routers: WeightFormat = "bfloat16" if has_narrow and is_narrow else "float32"
        return replace(self, routers=routers)


def explicit_choice(dtype: str, quantize: str | None, *, can_pack: bool) -> WeightChoice | None:
    """Return what the user said, None if that is nothing.

    Raises: ConfigError if it makes no sense or cannot be done without the CPU kernels.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of auto, {', '.join(DTYPES)}")
    if quantize is None:
        return None if dtype == "auto" else WeightChoice(_format(dtype), _format(dtype))
    if quantize not in QUANTIZED:
        raise ConfigError(f"quantize {quantize!r} is unknown; use one of {', '.join(QUANTIZED)}")
    if dtype != "auto":
        raise ConfigError(f"weights cannot be both quantized to {quantize} and kept in {dtype}: say one of the two")
    if not can_pack:
        raise ConfigError(
            "quantized weights are computed by the CPU kernels, which are not used here: "
            "install moeflow where there is a C++ compiler and run on --device cpu, or leave --quantize away"
        )
    # Four bits are too few for embeddings: every token passes through them twice.
    return WeightChoice(_format(quantize), "int8")


def instead_of(weight_format: str) -> str:
    """Return what to ask for where weights in a format take too much."""
    smaller = FORMATS[weight_format].smaller
    return f"{FORMATS[smaller].option} {smaller} or a smaller model" if smaller else "a smaller model"


def own_precision(
    checkpoint: Checkpoint, fits: Callable[[WeightChoice], bool], *, can_differ: bool = True
) -> WeightChoice:
    """Return the smallest formats that keep every weight as it is, or bfloat16 if that is needed and does not fit.

    One for all matrices, or, if that were float32 and layers `can_differ`, each as the file has it.
    """
    apart = names_apart(checkpoint)
    embeddings = {info.stored_as for name, info in checkpoint.tensors.items() if name in apart.embeddings}
    matrices = {info.stored_as for info in _matrices(checkpoint, apart)}
    choice = WeightChoice(_keeper(matrices), _keeper(embeddings), "the checkpoint's own precision", is_exact=True)
    if can_differ:
        choice = _with_several(choice, checkpoint, apart)
    if choice.matrices == "float32" and not fits(choice):
        return WeightChoice("bfloat16", "bfloat16", "the checkpoint's float32 would not fit into the free memory")
    return choice


def shares_layers(settings: Settings) -> bool:
    """Return whether other processes are to have parts of layers: these are cut and sent as if all were alike."""
    return bool(settings.num_ranks or settings.stages or settings.expert_parallel or settings.remote_experts)


def _with_several(choice: WeightChoice, checkpoint: Checkpoint, apart: NamesApart) -> WeightChoice:
    """Return a choice with each matrix as the file has it where one format for all would be float32."""
    if not apart.layers:
        return choice
    if choice.embeddings == "float32":
        formats = [_keeper_of(checkpoint, [name]) for name in CausalLM.embedding_names if name in checkpoint.tensors]
        choice = replace(choice, embeddings=formats[0], head=formats[-1] if len(set(formats)) > 1 else None)
    if choice.matrices != "float32":
        return choice
    layers = tuple(
        LayerFormats(**{part: _keeper_of(checkpoint, names) for part, names in layer.items()}) for layer in apart.layers
    )
    values: Counter[WeightFormat] = Counter()
    for layer, formats_of_layer in zip(apart.layers, layers, strict=True):
        for part, names in layer.items():
            values[getattr(formats_of_layer, part)] += sum(
                prod(checkpoint.tensors[name].shape) for name in names if name in checkpoint.tensors
            )
    (commonest, _), *others = values.most_common()
    if not others:
        return replace(choice, matrices=commonest)
    reason = "most matrices are stored so, and each other one stays in its own format, too"
    return replace(choice, matrices=commonest, layers=layers, reason=reason)


def _keeper_of(checkpoint: Checkpoint, names: Sequence[str]) -> WeightFormat:
    """Return the smallest format that keeps some tensors, as far as they are there."""
    stored_as = {checkpoint.tensors[name].stored_as for name in names if name in checkpoint.tensors}
    return _keeper(stored_as) if stored_as else "float32"


def for_torch(checkpoint: Checkpoint, fits_well: Callable[[WeightChoice], bool], *, is_cpu: bool) -> WeightChoice:
    """Return what suits torch, which keeps nothing in integers."""
    if not is_cpu:
        name: WeightFormat = "float32" if checkpoint.dtype == torch.float32 else "bfloat16"
        return WeightChoice(name, name, "the checkpoint's precision")
    wide = WeightChoice("float32", "float32", "takes under half of the free memory, and torch is fastest with it")
    if fits_well(wide):
        return wide
    return WeightChoice("bfloat16", "bfloat16", "float32 would take more than half of the free memory")


def _matrices(checkpoint: Checkpoint, apart: NamesApart) -> Iterator[TensorInfo]:
    """Yield what is packed in the format of matrices: neither embeddings nor routers, which are kept apart."""
    for name, info in checkpoint.tensors.items():
        if len(info.shape) == 2 and name not in apart.embeddings | apart.routers:
            yield info


def _keeper(stored_as: set[str]) -> WeightFormat:
    keepers = [name for name in ALL_FORMATS if stored_as <= FORMATS[name].keeps]
    return min(keepers, key=BITS_PER_VALUE.__getitem__, default="float32")


def _format(name: str) -> WeightFormat:
    return next(known for known in WEIGHT_FORMATS if known == name)

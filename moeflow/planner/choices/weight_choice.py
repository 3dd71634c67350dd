"""The format of an engine's weights. Only headers are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod

from moeflow.checkpoint.checkpoint import Checkpoint, TensorInfo
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.weight_format import (
    ALL_FORMATS,
    BITS_PER_VALUE,
    BLOCK_KINDS,
    DEVICE_DTYPES,
    DTYPES,
    FORMATS,
    MIXES,
    QUANTIZED,
    LayerFormats,
    Mix,
    WeightFormat,
)
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.loading import NamesApart, names_apart
from moeflow.planner.choices.mixes import mixed_formats
from moeflow.planner.costs.model_costs import Formats
from moeflow.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The formats of matrices, of embeddings (with the output projection) and of routers, and why these."""

    matrices: WeightFormat
    embeddings: WeightFormat
    reason: str = ""  # empty if the user said so
    is_own: bool = False  # the checkpoint's own formats: no weight is rounded
    is_exact: bool = False  # nor are activations that integers meet: these have 16 bits, else 8
    routers: WeightFormat = "float32"
    head: WeightFormat | None = None  # of the output projection; None: as embeddings
    layer_table: WeightFormat | None = None  # of embeddings for each layer; None: as of tokens
    layers: tuple[LayerFormats, ...] = ()  # of each layer's matrices, most being in `matrices`; empty: all are
    mix: Mix | None = None  # that these are; None: as the file has them, or one for all
    is_planar: bool = False  # matrices in other formats than floats are as kernels of a GPU read them

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.mix or self.matrices

    @property
    def has_integers(self) -> bool:
        """Whether any weights are integers, so that activations become integers, too."""
        outside = (self.matrices, self.embeddings, self.head, self.layer_table)
        names = {*outside, *(name for it in self.layers for name in astuple(it))}
        return not names <= {*DTYPES, None}

    @property
    def formats(self) -> WeightFormats:
        """How weights are packed."""
        return WeightFormats(
            self.matrices,
            self.embeddings,
            self.routers,
            is_wide=self.is_exact,
            head=self.head,
            layer_table=self.layer_table,
            layers=self.layers,
        )

    def costed(self, kv: str, *, activation_bytes: int = 4, is_table_on_disk: bool = False) -> Formats:
        """Return the formats that costs depend on, with those of keys, values and activations."""
        return Formats(
            matrices=self.matrices,
            embeddings=self.embeddings,
            kv=kv,
            activation_bytes=activation_bytes,
            routers=self.routers,
            head=self.head,
            layer_table=self.layer_table,
            is_table_on_disk=is_table_on_disk,
            layers=self.layers,
            is_wide=self.is_exact,
            is_planar=self.is_planar,
        )

    def with_routers(self, checkpoint: Checkpoint) -> WeightChoice:
        """Return the same with a checkpoint's format of routers: bfloat16 if they and all else are, else float32."""
        names = names_apart(checkpoint).routers
        has_narrow = all(checkpoint.tensors[name].stored_as == "bfloat16" for name in names)
        is_narrow = self.embeddings == "bfloat16" and self.is_own and self.is_planar
        is_narrow |= self.matrices == "bfloat16" and not self.layers
        routers: WeightFormat = "bfloat16" if has_narrow and is_narrow else "float32"
        return replace(self, routers=routers)


def explicit_choice(
    dtype: str, quantize: str | None, shape: ModelConfig, *, can_pack: bool, can_differ: bool = True
) -> WeightChoice | None:
    """Return what the user said, for a model of some shape, None if that is nothing; `can_differ` as `own_precision`.

    Raises: ConfigError if it makes no sense or cannot be done without the CPU kernels.
    """
    if dtype not in ("auto", *DEVICE_DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of auto, {', '.join(DEVICE_DTYPES)}")
    if quantize is None:
        return None if dtype == "auto" else WeightChoice(known_format(dtype), known_format(dtype))
    mix = next((known for known in MIXES if known == quantize), None)
    if mix is None and quantize not in QUANTIZED:
        raise ConfigError(f"quantize {quantize!r} is unknown; use one of {', '.join((*QUANTIZED, *MIXES))}")
    check_alone(quantize, dtype)
    if not can_pack:
        raise ConfigError(
            "quantized weights need the CPU kernels, which are not used here: "
            "install moeflow where there is a C++ compiler and run on --device cpu, or remove --quantize"
        )
    if mix is not None:
        mixed = mixed_formats(mix, shape, can_differ=can_differ)
        return WeightChoice(mixed.matrices, mixed.embeddings, layers=mixed.layers, mix=mix)
    # Four bits are too few for embeddings: every token passes through them twice.
    return WeightChoice(known_format(quantize), "int8")


def check_alone(quantize: str, dtype: str) -> None:
    """Raise ConfigError if weights are to be both quantized and of a dtype."""
    if dtype != "auto":
        raise ConfigError(
            f"weights cannot be both quantized to {quantize} and kept in {dtype}: remove --quantize or --dtype"
        )


def of_shape(asked: WeightChoice | None) -> WeightChoice:
    """Return the formats of a model without weights here: as asked for, or as most models are published."""
    chosen = asked or WeightChoice("bfloat16", "bfloat16", "as such models are published")
    return replace(chosen, routers="bfloat16" if chosen.matrices == "bfloat16" else "float32")


def activations_reason(*, is_exact: bool) -> str:
    """Return what integer weights of a file meet, and what the other choice would bring."""
    if is_exact:
        return "16 bits: next to exact; --fast-activations reads prompts faster"
    return "8 bits in groups of 32; --exact-activations takes 16, which lose next to nothing"


def instead_of(weight_format: str) -> str:
    """Return what to ask for where weights in a format take too much."""
    smaller = FORMATS[weight_format].smaller
    if smaller is None:
        return "a smaller model"
    option = "--quantize" if smaller in MIXES else FORMATS[smaller].option
    return f"{option} {smaller} or a smaller model"


def own_precision(
    checkpoint: Checkpoint,
    fits: Callable[[WeightChoice], bool],
    *,
    can_differ: bool = True,
    is_exact: bool = True,
) -> WeightChoice:
    """Return the smallest formats that keep every weight as it is, or bfloat16 if that is needed and does not fit.

    One for all matrices, or, if that were float32 and layers `can_differ`, each as the file has it.
    """
    apart = names_apart(checkpoint)
    embeddings = {info.stored_as for name, info in checkpoint.tensors.items() if name in apart.embeddings}
    matrices = {info.stored_as for info in matrices_of(checkpoint, apart)}
    choice = WeightChoice(_keeper(matrices), _keeper(embeddings), _own_reason(matrices), is_own=True)
    if can_differ:
        choice = _with_several(choice, checkpoint, apart)
    choice = replace(choice, is_exact=is_exact)
    if choice.matrices == "float32" and not fits(choice):
        return WeightChoice("bfloat16", "bfloat16", "the checkpoint's float32 would not fit into the free memory")
    return choice


def _own_reason(stored_as: set[str]) -> str:
    """Return why a checkpoint's matrices are kept as they are, or what about them no smaller format holds."""
    widened = sorted(stored_as - {*DTYPES, "float16", *BLOCK_KINDS})
    if widened:
        return f"the checkpoint's own precision: no smaller format holds {' or '.join(widened)}"
    return "the checkpoint's own precision"


def shares_layers(settings: Settings) -> bool:
    """Return whether other processes are to have experts of this one, which are sent as if all were alike."""
    return settings.remote_experts is not None


def _with_several(choice: WeightChoice, checkpoint: Checkpoint, apart: NamesApart) -> WeightChoice:
    """Return a choice with each matrix as the file has it where one format for all would be float32."""
    if not apart.layers:
        return choice
    if choice.embeddings == "float32":
        tokens, head, layer_table = (
            keeper_of(checkpoint, [name]) if name in checkpoint.tensors else None for name in CausalLM.embedding_names
        )
        assert tokens is not None, "there are token embeddings"
        head, layer_table = (None if it == tokens else it for it in (head, layer_table))
        choice = replace(choice, embeddings=tokens, head=head, layer_table=layer_table)
    if choice.matrices != "float32":
        return choice
    layers = tuple(
        LayerFormats(**{part: keeper_of(checkpoint, names) for part, names in layer.items()}) for layer in apart.layers
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
    reason = _widened_reason(checkpoint, apart) or (
        "most matrices are stored so, and each other one stays in its own format, too"
    )
    return replace(choice, matrices=commonest, layers=layers, reason=reason)


def _widened_reason(checkpoint: Checkpoint, apart: NamesApart) -> str | None:
    """Return what keeps some matrices in float32 where each has its own format; None: nothing does."""
    for names in (names for layer in apart.layers for names in layer.values()):
        stored_as = kinds_of(checkpoint, names)
        if not stored_as <= {*DTYPES, "float16"} and _keeper(stored_as) == "float32":
            held = " and ".join(sorted(stored_as))
            together = " together, as gate and up projections of one layer are kept" * (len(stored_as) > 1)
            return f"no smaller format than float32 holds {held}{together}; each other matrix stays in its own format"
    return None


def keeper_of(checkpoint: Checkpoint, names: Sequence[str]) -> WeightFormat:
    """Return the smallest format that keeps some tensors, as far as they are there."""
    stored_as = kinds_of(checkpoint, names)
    return _keeper(stored_as) if stored_as else "float32"


def kinds_of(checkpoint: Checkpoint, names: Sequence[str]) -> set[str]:
    """Return what some tensors are stored as, as far as they are there."""
    return {checkpoint.tensors[name].stored_as for name in names if name in checkpoint.tensors}


def for_torch(checkpoint: Checkpoint, fits_well: Callable[[WeightChoice], bool]) -> WeightChoice:
    """Return the format of weights with which torch computes on the CPU."""
    wide = WeightChoice("float32", "float32", "takes under half of the free memory, and torch is fastest with it")
    if fits_well(wide):
        return wide
    return WeightChoice("bfloat16", "bfloat16", "float32 would take more than half of the free memory")


def matrices_of(checkpoint: Checkpoint, apart: NamesApart) -> Iterator[TensorInfo]:
    """Yield the tensors packed in the format of matrices: neither embeddings nor routers, which are kept apart."""
    not_packed = apart.embeddings | apart.routers
    for name, info in checkpoint.tensors.items():
        if len(info.shape) == 2 and name not in not_packed:
            yield info


def _keeper(stored_as: set[str]) -> WeightFormat:
    keepers = [name for name in ALL_FORMATS if stored_as <= FORMATS[name].keeps]
    return min(keepers, key=BITS_PER_VALUE.__getitem__, default="float32")


def known_format(name: str) -> WeightFormat:
    """Return a format that settings may name."""
    return next(known for known in (*DEVICE_DTYPES, *QUANTIZED) if known == name)

"""Draft models: their names, formats and memory.

Only headers and vocabularies are read.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.draft_vocabulary import read_draft_vocabulary
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.vocabulary import read_vocabulary
from moeflow.core.engine_config import BLOCK_SIZE, DraftModelConfig
from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.core.units import format_bytes
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.weight_format import BITS_PER_VALUE, DTYPES, QUANTIZED, WEIGHT_FORMATS, WeightFormat
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.batching_choice import DEFAULT_MAX_NUM_SEQS
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, own_precision
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.work_space import work_bytes
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.checkpoint.hub import local_models

EARLY_EXIT: Final = "early-exit"
OWN: Final = "self"
MOST_BITS: Final = BITS_PER_VALUE["int8"]  # nearly as fast as int4, which makes a small model draft much worse
KV_TOKENS: Final = 16384  # that a drafting model keeps: it is of use for few requests at a time
CHUNK_TOKENS: Final = 128  # of prompts that it computes before a pass: as long as the pass waits
_MOST_DIGITS: Final = 9  # of a number of layers
_EXIT_SHARE: Final = 3  # of the layers, one in so many drafts
_MOST_OTHERS: Final = 0.01  # of common tokens that may stand for other text: reserved ones, in models of one family


def choose_draft_model(
    name: str, settings: Settings, checkpoint: Checkpoint, shape: ModelConfig, *, cpu_isa: str
) -> DraftModelConfig:
    """Return the model that a speculator's name means, for a model of this shape.

    Raises: ConfigError if there is none, or it cannot draft for this model; CheckpointError if it cannot be read.
    """
    kind, _, detail = name.partition(":")
    if kind == EARLY_EXIT:
        return _early_exit(name, detail, settings, shape, cpu_isa)
    path, weight_format = _path_and_format(name)
    if path == OWN:
        weights = _weights(weight_format, checkpoint, can_pack=bool(cpu_isa))
        return _config(name, checkpoint, shape, weights, settings, cpu_isa)
    place = local_models.local_path(path)
    if not Path(place).exists():
        raise ConfigError(
            f"speculator {name!r} is unknown, and there is no such file. Name suffix, {EARLY_EXIT}, {OWN}:int8, "
            "dense-source (of the built-in model), or a small model's folder, .gguf file or name"
        )
    absolute = Path(place).absolute()
    with closing(open_checkpoint(absolute)) as draft:
        draft_shape = read_model_config(draft)
        _check_vocabulary(draft, checkpoint, draft_shape.vocab_size)
        weights = _weights(weight_format, draft, can_pack=bool(cpu_isa))
        return _config(f"{absolute}{name[len(path) :]}", draft, draft_shape, weights, settings, cpu_isa)


def explain(draft: DraftModelConfig) -> str:
    """Return what a model is and takes, in a few words."""
    what = f"the first {draft.num_layers} layers" if draft.is_early_exit else f"a model in {draft.weight_format}"
    tokens = draft.num_blocks * BLOCK_SIZE
    return f"{draft.name}: {what}, {format_bytes(draft.num_bytes)} with keys and values of {tokens} tokens"


def _early_exit(name: str, detail: str, settings: Settings, shape: ModelConfig, cpu_isa: str) -> DraftModelConfig:
    most = shape.num_layers - 1
    is_number = detail.isdecimal() and len(detail) <= _MOST_DIGITS
    number = int(detail) if is_number else max(shape.num_layers // _EXIT_SHARE, 1)
    if (detail and not is_number) or not 1 <= number <= most:
        raise ConfigError(
            f"speculator {truncated_repr(name)} is not possible: after {EARLY_EXIT}: comes a number of layers "
            f"from 1 to {most}"
        )
    if settings.record_routing is not None:
        raise ConfigError(f"{EARLY_EXIT} would be recorded, too (--record-routing): remove one of the two")
    kv = replace(shape, num_layers=number)
    return DraftModelConfig(
        name=name,
        num_layers=number,
        kv_dtype=_kv_dtype(cpu_isa),
        num_blocks=_num_blocks(settings, shape),
        chunk_tokens=CHUNK_TOKENS,
        num_bytes=_kv_bytes(settings, kv, cpu_isa) + _work_bytes(settings, shape),
    )


def _path_and_format(name: str) -> tuple[str, str | None]:
    """Return the model that is named, and the format if there is one."""
    path, _, given = name.rpartition(":")
    return (path, given) if path and given in WEIGHT_FORMATS else (name, None)


def _weights(weight_format: str | None, checkpoint: Checkpoint, *, can_pack: bool) -> WeightChoice:
    """Return a model's formats: those named, or few bits, as few as its file has. Raises: ConfigError."""
    dtype = weight_format if weight_format in DTYPES else "auto"
    quantize = weight_format if weight_format in QUANTIZED else None
    chosen = explicit_choice(dtype, quantize, read_model_config(checkpoint), can_pack=can_pack)
    if chosen is not None:
        return chosen
    if not can_pack:
        return WeightChoice("float32", "float32")
    own = own_precision(checkpoint, lambda _: True, can_differ=False)
    return WeightChoice(_at_most_int8(own.matrices), _at_most_int8(own.embeddings))


def _at_most_int8(own: WeightFormat) -> WeightFormat:
    return own if BITS_PER_VALUE[own] <= MOST_BITS else "int8"


def _config(
    name: str, draft: Checkpoint, shape: ModelConfig, weights: WeightChoice, settings: Settings, cpu_isa: str
) -> DraftModelConfig:
    weights = weights.with_routers(draft)
    formats = Formats(
        matrices=weights.matrices, embeddings=weights.embeddings, kv=_kv_dtype(cpu_isa), routers=weights.routers
    )
    beside = _kv_bytes(settings, shape, cpu_isa) + _work_bytes(settings, shape)
    drafted = read_draft_vocabulary(draft.path, shape.vocab_size) or []  # whose rows lie apart from the whole matrix
    beside += int(len(drafted) * shape.hidden_size * BITS_PER_VALUE[weights.embeddings] / 8)
    return DraftModelConfig(
        name=name,
        model_path=str(draft.path),
        num_layers=shape.num_layers,
        weight_format=weights.matrices,
        embedding_format=weights.embeddings,
        router_format=weights.routers,
        kv_dtype=_kv_dtype(cpu_isa),
        num_blocks=_num_blocks(settings, shape),
        chunk_tokens=CHUNK_TOKENS,
        num_bytes=int(ModelCosts(shape, formats).model_bytes) + beside,
    )


def _kv_dtype(cpu_isa: str) -> str:
    """Return how keys and values are kept: narrow, where the kernels attend."""
    return "bfloat16" if cpu_isa else "float32"


def _num_blocks(settings: Settings, shape: ModelConfig) -> int:
    longest = min(settings.max_model_len or shape.max_position, shape.max_position)
    return -(-min(KV_TOKENS, longest * (settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS)) // BLOCK_SIZE)


def _kv_bytes(settings: Settings, shape: ModelConfig, cpu_isa: str) -> int:
    return _num_blocks(settings, shape) * BLOCK_SIZE * shape.kv_bytes_per_token(_kv_dtype(cpu_isa))


def _work_bytes(settings: Settings, shape: ModelConfig) -> int:
    """Return a pass's work space, which matters within a limit only."""
    if settings.memory_bytes is None:
        return 0
    num_sampled = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    return work_bytes(shape, num_tokens=CHUNK_TOKENS + 2 * num_sampled, num_sampled=num_sampled)


def _check_vocabulary(draft: Checkpoint, checkpoint: Checkpoint, num_embeddings: int) -> None:
    """Check that token ids mean the same to both models, and that the draft has `num_embeddings` for all of them.

    Embeddings may differ in rows without a token, which only fill up the matrix. Raises: ConfigError.
    """
    own, other = read_vocabulary(checkpoint.path), read_vocabulary(draft.path)
    common = len(own.keys() & other.keys())
    same = sum(other.get(token) == token_id for token, token_id in own.items())
    least = min(len(own), len(other))
    if same < (1 - _MOST_OTHERS) * least:
        raise ConfigError(
            f"{draft.path} cannot draft for {checkpoint.path}: its tokenizer is another one ({same} tokens of {least} "
            f"have the same number, {common} the same text). Take a small model of the same family"
        )
    need = max(own.values(), default=-1) + 1
    if num_embeddings < need:
        raise ConfigError(
            f"{draft.path} cannot draft for {checkpoint.path}: the tokenizer needs {need} embeddings, and the draft "
            f"has {num_embeddings}. Take a small model of the same family and version"
        )

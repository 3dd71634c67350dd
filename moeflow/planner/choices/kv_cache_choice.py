"""How keys and values are kept, in how many blocks, and how long a request may therefore be, each with its reason."""

from __future__ import annotations

from typing import Final

import msgspec

from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.settings.settings import Settings

KV_DTYPES: Final = ("float32", "bfloat16", "int8")  # that the engine keeps them in
MIN_KV_TOKENS: Final = 2048  # weights that leave less memory than these need do not count as fitting into --memory
KV_SHARE: Final = 0.25  # of the memory that is free once the weights are loaded
KV_SHARE_BESIDE_SLOTS: Final = 0.5  # if experts come from disk: keys and values take memory from their slots
KV_SHARE_KEPT: Final = 0.125  # that unused keys and values keep there: the more experts are in memory, the less is read


class KVCacheChoice(msgspec.Struct, frozen=True):
    """The cache of keys and values as it is allocated."""

    dtype: str
    num_blocks: int
    block_bytes: int  # of all layers
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        """Bytes once all blocks are in use."""
        return self.num_blocks * self.block_bytes


def choose_kv_cache(
    settings: Settings,
    shape: ModelConfig,
    *,
    torch_dtype: str | None,
    left_bytes: int,
    share: float,
    max_num_seqs: int,
    least_blocks: int = 0,
    reasons: Reasons,
) -> KVCacheChoice:
    """Decide for a cache that takes `share` of the bytes that weights and processes leave, unless the user says more.

    `torch_dtype` is what torch attends in, None where the CPU kernels do. `least_blocks` fit whatever the share.

    Raises: ConfigError for a setting that makes no sense, CapacityError if it does not fit, or holds no request.
    """
    dtype = _dtype(settings, shape, torch_dtype, int(left_bytes * share), reasons)
    block_bytes = _block_bytes(shape, dtype)
    if settings.max_model_len is not None and settings.max_model_len > shape.max_position:
        raise ConfigError(
            f"max_model_len {settings.max_model_len} is beyond the {shape.max_position} tokens this model was made for"
        )
    blocks_per_request = -(-(settings.max_model_len or shape.max_position) // BLOCK_SIZE)
    if not block_bytes:  # an encoder alone keeps none: blocks are a number of tokens
        num_blocks = blocks_per_request * max_num_seqs
    elif settings.kv_cache_bytes is None:
        within_share = min(blocks_per_request * max_num_seqs, int(left_bytes * share) // block_bytes)
        num_blocks = max(within_share, least_blocks)
        why = f"{share:.0%} of what the weights leave, at most" if num_blocks == within_share else "for the workload"
        reasons.append(("kv_cache", f"{format_bytes(num_blocks * block_bytes)}: {why}"))
        _check_room(num_blocks * block_bytes, left_bytes)
    else:
        _check_room(settings.kv_cache_bytes, left_bytes)
        num_blocks = settings.kv_cache_bytes // block_bytes
    min_blocks = blocks_per_request if settings.max_model_len else 1
    if num_blocks < min_blocks:
        raise CapacityError(
            f"one request of {settings.max_model_len or BLOCK_SIZE} tokens needs a KV cache of "
            f"{format_bytes(min_blocks * block_bytes)}, but it has "
            f"{format_bytes(num_blocks * block_bytes)}: enlarge the KV cache or lower max_model_len"
        )
    return KVCacheChoice(dtype, num_blocks, block_bytes, _max_model_len(settings, shape, num_blocks, reasons))


def _check_room(num_bytes: int, left_bytes: int) -> None:
    if num_bytes > left_bytes:
        raise CapacityError(
            f"a KV cache of {format_bytes(num_bytes)} is asked for, but the weights leave "
            f"only {format_bytes(left_bytes)}: ask for less"
        )


def _dtype(settings: Settings, shape: ModelConfig, torch_dtype: str | None, share_bytes: int, reasons: Reasons) -> str:
    requested = settings.kv_dtype
    if requested != "auto":
        if requested not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {requested!r} is unknown; use one of auto, {', '.join(KV_DTYPES)}")
        return requested
    if torch_dtype is not None:
        reasons.append(("kv_dtype", f"{torch_dtype}: what is computed in"))
        return torch_dtype
    budget = settings.kv_cache_bytes or share_bytes
    if (settings.max_model_len or 0) * _block_bytes(shape, "float32") > budget * BLOCK_SIZE:
        reasons.append(("kv_dtype", "bfloat16: in float32 one request of max_model_len would not fit"))
        return "bfloat16"
    reasons.append(("kv_dtype", "float32: exact; bfloat16 holds twice the tokens, int8 about four times"))
    return "float32"


def _max_model_len(settings: Settings, shape: ModelConfig, num_blocks: int, reasons: Reasons) -> int:
    if settings.max_model_len is not None:
        return settings.max_model_len
    max_model_len = min(shape.max_position, num_blocks * BLOCK_SIZE)
    why = "KV cache" if max_model_len < shape.max_position else "the model's context"
    reasons.append(("max_model_len", f"{max_model_len}: {why}"))
    return max_model_len


def _block_bytes(shape: ModelConfig, kv_dtype: str) -> int:
    return shape.kv_bytes_per_token(kv_dtype) * BLOCK_SIZE


def min_kv_bytes(settings: Settings, shape: ModelConfig, dtype: str) -> int:
    """Return how much keys and values must have beside weights that stay in memory, where `dtype` is computed in."""
    min_tokens = min(settings.max_model_len or shape.max_position, MIN_KV_TOKENS)
    kv_dtype = dtype if settings.kv_dtype not in KV_DTYPES else settings.kv_dtype
    return settings.kv_cache_bytes or -(-min_tokens // BLOCK_SIZE) * _block_bytes(shape, kv_dtype)


def kv_share(*, has_slots: bool, takes_all: bool) -> float:
    """Return how much of what weights leave keys and values may take.

    `takes_all`: the user set the memory, and nothing else needs it.
    """
    if has_slots:
        return KV_SHARE_BESIDE_SLOTS
    return 1.0 if takes_all else KV_SHARE


def num_kept_blocks(settings: Settings, cache: KVCacheChoice, share: float) -> int:
    """Return how many unused blocks stay in memory: all, if the user sets the memory."""
    if settings.kv_cache_bytes is not None:
        return cache.num_blocks
    max_bytes = int(cache.num_bytes * KV_SHARE_KEPT / share)
    return max(max_bytes * cache.num_blocks // max(cache.num_bytes, 1), 1)

"""One layer's keys and values of past tokens: fixed blocks, stored so that kernels read them in a row.

A block has a cell for each KV head (csrc/ops/kv_cache.h): keys transposed [D, block_size], then values [block_size, D].
For int8, float scales of each token's key and value follow.
In latent attention, values are the first L dimensions of keys and stored once: rows [block_size, D]. For int8, each
token has a scale for these dimensions and one for the rest. The plain torch code here runs on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from moeflow.kernels.arrays import Array, address, as_tensor, dtype_name, is_in_main_memory
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import DType


try:
    import moeflow.kernels._cpu as _cpu
except ImportError:
    _cpu = None

_VALUE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KV_DTYPES: Final = ("float32", "bfloat16", "int8")  # that the CPU extension takes
_LANES = 16  # positions that kernels process at once: block sizes are multiples of this
_DIM_STEP = 2  # dimensions likewise, as rotary positions do
_TINY = 1e-30  # keys and values below this become zero as int8


class KVBlocks:
    """The blocks of one layer."""

    __slots__ = ("_seen", "block_size", "dtype", "handle", "head_dim", "latent_dim", "num_kv_heads", "storage")

    def __init__(
        self,
        storage: Array,
        dtype: DType | str,
        *,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        latent_dim: int = 0,
    ) -> None:
        """View storage [num_blocks * kv_block_bytes(...)] uint8 as blocks.

        `latent_dim`: how many dimensions of a key are its value, too; 0: values are stored by themselves.
        """
        self.storage = storage
        self.dtype = dtype_name(dtype)
        self.block_size = block_size
        self.head_dim = head_dim
        self.latent_dim = latent_dim
        self.num_kv_heads = num_kv_heads
        self._seen: _Seen | None = None
        self.handle: Any = None  # for the kernels of the CPU extension; None: they do not take these blocks
        dims = (head_dim, latent_dim)
        is_taken = self.dtype in KV_DTYPES and not block_size % _LANES and not _are_odd(dims)
        if _cpu is not None and is_in_main_memory(storage) and is_taken:
            self.handle = _cpu.KVCache(
                format=self.dtype,
                data=address(storage),
                num_blocks=storage.nbytes // (num_kv_heads * _cell_bytes(self.dtype, block_size, *dims)),
                num_heads=num_kv_heads,
                block_size=block_size,
                head_dim=head_dim,
                latent_dim=latent_dim,
            )

    @property
    def value_dim(self) -> int:
        """Dimensions of a value."""
        return self.latent_dim or self.head_dim

    @property
    def seen(self) -> _Seen:
        """The blocks as torch sees them."""
        if self._seen is None:
            self._seen = _Seen.of(self)
        return self._seen

    @property
    def keys(self) -> Tensor:
        """All keys: [B, KV, block_size, D]."""
        return self.seen.keys

    @property
    def values(self) -> Tensor:
        """All values: [B, KV, block_size, value_dim]."""
        return self.seen.values

    @property
    def key_scales(self) -> Tensor | None:
        """Scales of keys, or of their dimensions that are not values, for int8: [B, KV, block_size]."""
        return self.seen.key_scales

    @property
    def value_scales(self) -> Tensor | None:
        """Likewise for values."""
        return self.seen.value_scales

    def write(self, slots: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        """Store K and V of tokens, or K alone where values are a part of it.

        Shapes: slots [T], which are block * block_size + offset, k and v [T, KV, D].
        """
        blocks, offsets = slots // self.block_size, slots % self.block_size
        for stored, scales, x in zip(self._parts(), (self.key_scales, self.value_scales), self._cut(k, v), strict=True):
            if scales is not None:
                x, of_tokens = _quantize(x)
                scales.transpose(1, 2)[blocks, offsets] = of_tokens
            stored.transpose(1, 2)[blocks, offsets] = x.to(stored.dtype)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return the separately stored parts: keys, or their dimensions that are not values, and values."""
        return self.keys[..., self.latent_dim :], self.values

    def _cut(self, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the same of some tokens."""
        if self.latent_dim:
            assert v is None, "values are a part of keys"
            return k[..., self.latent_dim :], k[..., : self.latent_dim]
        assert v is not None, "values are stored by themselves"
        return k, v

    def move(self, from_slots: Array, to_slots: Array) -> None:
        """Copy K and V of tokens to other slots, one after another: from_slots and to_slots [n] int64."""
        if self.handle is not None:
            _cpu.move_kv(
                cache=self.handle,
                num_tokens=len(from_slots),
                **{"from": address(from_slots), "to": address(to_slots)},
            )
            return
        size = self.block_size
        for stored in (*self._parts(), self.key_scales, self.value_scales):
            if stored is not None:
                tokens = stored.transpose(1, 2)
                tokens[to_slots // size, to_slots % size] = tokens[from_slots // size, from_slots % size]

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V of whole blocks, one after another.

        Shapes: blocks [n] -> [KV, n * block_size, D] and [KV, n * block_size, value_dim].
        """
        keys, values = (_take(half, blocks).to(dtype) for half in (self.keys, self.values))
        if self.key_scales is not None and self.value_scales is not None:
            keys[..., self.latent_dim :] *= _take(self.key_scales, blocks).unsqueeze(-1)
            values *= _take(self.value_scales, blocks).unsqueeze(-1)
            keys[..., : self.latent_dim] = values[..., : self.latent_dim]
        return keys.flatten(1, 2), values.flatten(1, 2)


class _Seen(msgspec.Struct, frozen=True):
    """Blocks as one thinks of them."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @classmethod
    def of(cls, blocks: KVBlocks) -> _Seen:
        size, head_dim, latent_dim = blocks.block_size, blocks.head_dim, blocks.latent_dim
        num_bytes = _cell_bytes(blocks.dtype, size, head_dim, latent_dim)
        cells = as_tensor(blocks.storage).view(-1, blocks.num_kv_heads, num_bytes)
        half = size * head_dim * _VALUE_BYTES[blocks.dtype]
        end = half if latent_dim else 2 * half
        dtype = getattr(torch, blocks.dtype)
        first, last = (cells[..., start : start + half].view(dtype) for start in (0, end - half))
        scales = cells[..., end:].view(torch.float32) if blocks.dtype == "int8" else None
        firsts, lasts = (None, None) if scales is None else (scales[..., :size], scales[..., size:])
        rows = last.view(*last.shape[:2], size, head_dim)
        if latent_dim:
            return cls(rows, rows[..., :latent_dim], lasts, firsts)
        return cls(first.view(*first.shape[:2], head_dim, size).transpose(2, 3), rows, firsts, lasts)


def kv_block_bytes(
    dtype: DType | str, *, num_kv_heads: int, block_size: int, head_dim: int, latent_dim: int = 0
) -> int:
    """Bytes of a block of one layer."""
    return num_kv_heads * _cell_bytes(dtype_name(dtype), block_size, head_dim, latent_dim)


def _cell_bytes(dtype: str, block_size: int, head_dim: int, latent_dim: int) -> int:
    scales = 2 * block_size * _VALUE_BYTES["float32"] if dtype == "int8" else 0
    return (1 if latent_dim else 2) * block_size * head_dim * _VALUE_BYTES[dtype] + scales


def _are_odd(dims: tuple[int, ...]) -> bool:
    return any(dim % _DIM_STEP for dim in dims)


def _take(stored: Tensor, blocks: Tensor) -> Tensor:
    """Return blocks of stored [B, KV, ...] as [KV, n, ...]."""
    # First the blocks, then the heads: along other dimensions than the first, torch's CPU kernel copies a
    # non-contiguous tensor before it selects. Here that would be the whole cache.
    return stored.index_select(0, blocks).transpose(0, 1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, KV, D] as whole numbers from -127 to 127, and their scales [T, KV]."""
    largest = x.float().abs().amax(-1)
    inverse = torch.where(largest > _TINY, torch.full_like(largest, 127) / largest, 0.0)
    return (x.float() * inverse.unsqueeze(-1)).round(), largest / 127

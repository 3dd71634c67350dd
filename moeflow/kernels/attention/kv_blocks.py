"""One layer's keys and values of past tokens: fixed blocks, stored so that kernels read them in a row.

Within a block lies a cell for each KV head (csrc/kv_cache.h): keys transposed [D, block_size], then values
[block_size, D], then for int8 a float scale for each token's key and each token's value. What is here in plain torch
runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moeflow.kernels.arrays import Array, address, as_tensor, dtype_name, is_in_main_memory
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import DType


try:
    import moeflow.kernels._cpu as _cpu
except ImportError:
    _cpu = None

_VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_DTYPES: Final = tuple(_VALUE_BYTES)
_LANES = 16  # positions that the kernels take together: they want whole blocks of them
_DIM_STEP = 2  # dimensions likewise, as rotary positions do
_TINY = 1e-30  # keys and values below this become zero as int8


class KVBlocks:
    """The blocks of one layer."""

    __slots__ = ("_seen", "block_size", "dtype", "handle", "head_dim", "num_kv_heads", "storage")

    def __init__(
        self, storage: Array, dtype: DType | str, *, num_kv_heads: int, block_size: int, head_dim: int
    ) -> None:
        """View storage [num_blocks * kv_block_bytes(...)] uint8 as blocks."""
        self.storage = storage
        self.dtype = dtype_name(dtype)
        self.block_size = block_size
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self._seen: _Seen | None = None
        self.handle: Any = None  # for the kernels of the CPU extension; None: they do not take these blocks
        if _cpu is not None and is_in_main_memory(storage) and not block_size % _LANES and not head_dim % _DIM_STEP:
            self.handle = _cpu.KVCache(
                format=self.dtype,
                data=address(storage),
                num_blocks=storage.nbytes // (num_kv_heads * _cell_bytes(self.dtype, block_size, head_dim)),
                num_heads=num_kv_heads,
                block_size=block_size,
                head_dim=head_dim,
            )

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
        """All values: [B, KV, block_size, D]."""
        return self.seen.values

    @property
    def key_scales(self) -> Tensor | None:
        """What keys are multiplied by, for int8: [B, KV, block_size]."""
        return self.seen.key_scales

    @property
    def value_scales(self) -> Tensor | None:
        """Likewise for values."""
        return self.seen.value_scales

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V of tokens; slots [T] are block * block_size + offset. Shapes: k and v [T, KV, D]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        if self.key_scales is not None and self.value_scales is not None:
            k, key_scales = _quantize(k)
            v, value_scales = _quantize(v)
            self.key_scales.transpose(1, 2)[blocks, offsets] = key_scales
            self.value_scales.transpose(1, 2)[blocks, offsets] = value_scales
        self.keys.transpose(1, 2)[blocks, offsets] = k.to(self.keys.dtype)
        self.values.transpose(1, 2)[blocks, offsets] = v.to(self.values.dtype)

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
        for stored in (self.keys, self.values, self.key_scales, self.value_scales):
            if stored is not None:
                tokens = stored.transpose(1, 2)
                tokens[to_slots // size, to_slots % size] = tokens[from_slots // size, from_slots % size]

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V of whole blocks, one after another. Shapes: blocks [n] -> [KV, n * block_size, D] each."""
        keys, values = (_take(half, blocks).to(dtype) for half in (self.keys, self.values))
        if self.key_scales is not None and self.value_scales is not None:
            keys *= _take(self.key_scales, blocks).unsqueeze(-1)
            values *= _take(self.value_scales, blocks).unsqueeze(-1)
        return keys.flatten(1, 2), values.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Blocks as one thinks of them."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    @classmethod
    def of(cls, blocks: KVBlocks) -> _Seen:
        size, head_dim = blocks.block_size, blocks.head_dim
        cells = as_tensor(blocks.storage).view(-1, blocks.num_kv_heads, _cell_bytes(blocks.dtype, size, head_dim))
        half = size * head_dim * _VALUE_BYTES[blocks.dtype]
        keys, values = (cells[..., start : start + half].view(getattr(torch, blocks.dtype)) for start in (0, half))
        scales = cells[..., 2 * half :].view(torch.float32) if blocks.dtype == "int8" else None
        return cls(
            keys.view(*keys.shape[:2], head_dim, size).transpose(2, 3),
            values.view(*values.shape[:2], size, head_dim),
            None if scales is None else scales[..., :size],
            None if scales is None else scales[..., size:],
        )


def kv_block_bytes(dtype: DType | str, *, num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """Bytes of a block of one layer."""
    return num_kv_heads * _cell_bytes(dtype_name(dtype), block_size, head_dim)


def _cell_bytes(dtype: str, block_size: int, head_dim: int) -> int:
    scales = 2 * block_size * _VALUE_BYTES["float32"] if dtype == "int8" else 0
    return 2 * block_size * head_dim * _VALUE_BYTES[dtype] + scales


def _take(stored: Tensor, blocks: Tensor) -> Tensor:
    """Return blocks of stored [B, KV, ...] as [KV, n, ...]."""
    # First the blocks, then the heads: along any dimension but the first, torch's CPU kernel copies all of a tensor
    # that does not lie in a row before it selects from it, which here would be the whole cache.
    return stored.index_select(0, blocks).transpose(0, 1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, KV, D] as whole numbers from -127 to 127, and what they are to be multiplied by [T, KV]."""
    largest = x.float().abs().amax(-1)
    inverse = torch.where(largest > _TINY, torch.full_like(largest, 127) / largest, 0.0)
    return (x.float() * inverse.unsqueeze(-1)).round(), largest / 127

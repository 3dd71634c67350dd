"""GGUF's IQ1, IQ2 and IQ3 as blocks of levels, which kernels read: places in a grid become the grid's values.

In these types eight or four neighbours are one place in a grid of few levels, beside their signs. After the lookup in
the grid, each value is a level with a sign, in four bits. Each 16 or 32 values have a small scale. That is
the smallest form that kernels have for them, and no value changes.

    a block     an fp16 number | 16 (LEVELS_IQ2) or 8 scales, int8 | 128 bytes with codes
    16 of these have the codes of 32 values, byte j those of values j and j + 16

A code is a place in the kind's levels (csrc/formats/block_source_types.h), the fourth bit its sign. The grids
themselves are the gguf package's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeflow.checkpoint.gguf.blocks import grid_values
from moeflow.checkpoint.gguf.tensor_types import BLOCK_SIZES, TensorType
from moeflow.kernels.on_demand import torch
from moeflow.kernels.weight_format import LevelKind

if TYPE_CHECKING:
    from torch import Tensor

_VALUES: Final = 256  # of a block
_NEGATIVE: Final = 8  # in a code
# Places of a grid's values among a kind's levels (csrc/formats/block_source_types.h), by the value.
_IQ2: Final = {8: 0, 25: 1, 43: 2}
_IQ3_XXS: Final = {4: 0, 12: 1, 20: 2, 28: 3, 36: 4, 44: 5, 52: 6, 62: 7}
_IQ3_S: Final = {1: 0, 3: 1, 5: 2, 7: 3, 9: 4, 11: 5, 13: 6, 15: 7}
_IQ1_UP: Final = {-1: 4 | _NEGATIVE, 0: 3, 1: 5}  # in eighths, an eighth more: -7, 1, 9
_IQ1_DOWN: Final = {-1: 5 | _NEGATIVE, 0: 3 | _NEGATIVE, 1: 4}  # an eighth less: -9, -1, 7


class _Taken(NamedTuple):
    """Blocks taken apart."""

    numbers: NDArray[np.uint8]  # [n, 2], fp16
    scales: NDArray[np.uint8]  # [n, 8 or 16]: 2 s + 1 is the small scale
    codes: NDArray[np.uint8]  # [n, 256]


class _Grid(NamedTuple):
    kind: LevelKind
    take: Callable[[NDArray[np.uint8]], _Taken]  # of [n, bytes of a block]


def level_blocks(data: Tensor, kind: TensorType) -> Tensor:
    """Return whole blocks of a type of `LEVEL_KINDS`, [bytes] uint8, as blocks of levels, [n, bytes of one] uint8."""
    taken = _GRIDS[kind].take(data.numpy().reshape(-1, BLOCK_SIZES[kind][1]))
    halves = taken.codes.reshape(len(taken.codes), -1, 2, 16)
    bytes_of_codes = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(halves), -1)
    return torch.from_numpy(np.concatenate([taken.numbers, 2 * taken.scales + 1, bytes_of_codes], axis=1))


def _take_iq2_xxs(blocks: NDArray[np.uint8]) -> _Taken:
    pairs = _words(blocks[:, 2:], np.uint32).reshape(len(blocks), -1, 2)  # four places; four signs and a scale
    places = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    return _Taken(
        blocks[:, :2],
        _bytes(pairs[..., 1] >> 28).repeat(2, axis=1),  # in the file one for 32
        _looked_up(TensorType.IQ2_XXS, _IQ2, places) ^ _signs_of_sevens(_sevens(pairs[..., 1])),
    )


def _take_iq2_xs(blocks: NDArray[np.uint8]) -> _Taken:
    places = _words(blocks[:, 2:66], np.uint16)
    return _Taken(
        blocks[:, :2],
        _nibbles(blocks[:, 66:]),
        _looked_up(TensorType.IQ2_XS, _IQ2, places & 511) ^ _signs_of_sevens(places >> 9),
    )


def _take_iq2_s(blocks: NDArray[np.uint8]) -> _Taken:
    places = blocks[:, 2:34] | _parts(blocks[:, 66:74], 2).astype(np.uint16) << 8
    return _Taken(
        blocks[:, :2],
        _nibbles(blocks[:, 74:]),
        _looked_up(TensorType.IQ2_S, _IQ2, places) ^ _signs_of_bits(blocks[:, 34:66]),
    )


def _take_iq3_xxs(blocks: NDArray[np.uint8]) -> _Taken:
    words = _words(blocks[:, 66:], np.uint32)
    return _Taken(
        blocks[:, :2],
        _bytes(words >> 28),
        _looked_up(TensorType.IQ3_XXS, _IQ3_XXS, blocks[:, 2:66]) ^ _signs_of_sevens(_sevens(words)),
    )


def _take_iq3_s(blocks: NDArray[np.uint8]) -> _Taken:
    places = blocks[:, 2:66] | _parts(blocks[:, 66:74], 1).astype(np.uint16) << 8
    return _Taken(
        blocks[:, :2],
        _nibbles(blocks[:, 106:]),
        _looked_up(TensorType.IQ3_S, _IQ3_S, places) ^ _signs_of_bits(blocks[:, 74:106]),
    )


def _take_iq1_s(blocks: NDArray[np.uint8]) -> _Taken:
    words = _words(blocks[:, 34:], np.uint16)
    high = _threes(words)
    places = blocks[:, 2:34] | high.astype(np.uint16) << 8
    scales = _bytes(words >> 12 & 7).repeat(2, axis=1)  # in the file one for 32
    return _Taken(blocks[:, :2], scales, _iq1_codes(places, (words >> 15).repeat(4, axis=1)))


def _take_iq1_m(blocks: NDArray[np.uint8]) -> _Taken:
    high = _nibbles(blocks[:, 32:48])
    words = _words(blocks[:, 48:], np.uint16)
    numbers = words[:, 0] >> 12 | words[:, 1] >> 8 & 0xF0 | words[:, 2] >> 4 & 0xF00 | words[:, 3] & 0xF000
    scales = _threes(words)
    places = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    return _Taken(numbers[:, None].view(np.uint8), scales, _iq1_codes(places, high >> 3))


_GRIDS: Final = {
    TensorType.IQ2_XXS: _Grid("LEVELS_IQ2", _take_iq2_xxs),
    TensorType.IQ2_XS: _Grid("LEVELS_IQ2", _take_iq2_xs),
    TensorType.IQ2_S: _Grid("LEVELS_IQ2", _take_iq2_s),
    TensorType.IQ1_S: _Grid("LEVELS_IQ2", _take_iq1_s),
    TensorType.IQ1_M: _Grid("LEVELS_IQ2", _take_iq1_m),
    TensorType.IQ3_XXS: _Grid("LEVELS_IQ3_XXS", _take_iq3_xxs),
    TensorType.IQ3_S: _Grid("LEVELS_IQ3_S", _take_iq3_s),
}
LEVEL_KINDS: Final = {kind: grid.kind for kind, grid in _GRIDS.items()}


def _iq1_codes(places: NDArray[np.integer], is_down: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the codes of [n, 32] places, an eighth less or more than the grid's values."""
    up, down = _looked_up(TensorType.IQ1_S, _IQ1_UP, places), _looked_up(TensorType.IQ1_S, _IQ1_DOWN, places)
    return np.where(is_down.repeat(8, axis=1) != 0, down, up)


def _looked_up(kind: TensorType, codes: dict[int, int], places: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the codes of the values that places of a grid stand for, [n, 256]."""
    found: NDArray[np.uint8] = _grid(kind, tuple(codes.items()))[places]
    return found.reshape(len(places), _VALUES)


@cache
def _grid(kind: TensorType, codes: tuple[tuple[int, int], ...]) -> NDArray[np.uint8]:
    """Return the codes of a grid's values, [places, values of one]."""
    values = grid_values(kind)
    found = np.zeros(values.shape, np.uint8)
    for value, code in codes:
        found[values == value] = code
    return found


@cache
def _signs_of_eights() -> NDArray[np.uint8]:
    """Return what changes the signs of eight codes, by a byte with a bit for each, [256, 8]."""
    return (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.uint8) * _NEGATIVE


def _signs_of_bits(signs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return _signs_of_eights()[signs].reshape(len(signs), _VALUES)


def _signs_of_sevens(signs: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the same of seven bits, to which an eighth is added where it makes their number even."""
    sevens = np.arange(128)
    is_odd = (sevens[:, None] >> np.arange(7) & 1).sum(axis=1) & 1
    return _signs_of_bits((sevens | is_odd << 7).astype(np.uint8)[signs])


def _sevens(words: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the four lowest seven bits of words, [n, 4 * words]."""
    return (words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(len(words), -1)


def _threes(words: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the four lowest three bits of words of 16, [n, 4 * words]."""
    return _bytes(words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(words), -1)


def _parts(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the numbers of so many bits that bytes have, the lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return _bytes(packed[..., None] >> shifts & ((1 << bits) - 1)).reshape(len(packed), -1)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return _parts(packed, 4)


def _words(packed: NDArray[np.uint8], dtype: type[np.uint16] | type[np.uint32]) -> NDArray[np.integer]:
    return np.ascontiguousarray(packed).view(dtype)


def _bytes(numbers: NDArray[np.integer]) -> NDArray[np.uint8]:
    return numbers.astype(np.uint8)

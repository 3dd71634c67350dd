"""The Python face of the CPU extension: packed weights, and the operations on them.

Weights are packed once into the order in which kernels read them (csrc/matrix.h); activations are float32
throughout. A row's result is the same bits alone and in any batch, at any number of threads. The extension sees
addresses and sizes only: shapes and types are checked here, and here memory is kept alive.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from moeflow.kernels.lazy_memory import allocate_lazily
from moeflow.kernels.weight_format import GROUP_SIZE, WEIGHT_FORMATS, WeightFormat

try:
    import moeflow.kernels._cpu as _cpu
except ImportError as error:
    _WHY_NOT = f"the extension for the CPU is not installed ({error})"
else:
    _WHY_NOT = ""

_FORMAT_CODES: Final = {name: code for code, name in enumerate(WEIGHT_FORMATS)}
_SOURCE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BLOCK_BYTES: Final = {"int8": 34, "int4": 18}  # of GGUF's Q8_0 and Q4_0, 32 values each
_BAND = 16  # output rows that lie together


def is_available() -> bool:
    """Say whether the extension is there; without it everything else here fails."""
    return not _WHY_NOT


def why_not() -> str:
    """Say why the extension is not there; empty if it is."""
    return _WHY_NOT


def set_num_threads(num_threads: int) -> None:
    """Compute with this many threads, the calling one included."""
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads cannot compute; at least 1 can")
    _cpu.set_num_threads(num_threads)


def num_threads() -> int:
    """Return the number of threads that compute, the calling one included."""
    count: int = _cpu.num_threads()
    return count


def use_isa(cap: str) -> None:
    """Use the best instruction set of this processor up to `cap`; empty: the best there is.

    Raises: ValueError if `cap` is not "generic", "avx2", "avx512", "avx512_vnni" or "avx512_bf16".
    """
    _cpu.use_isa(cap)


def isa_name() -> str:
    """Return the name of the instruction set in use."""
    name: str = _cpu.isa_name()
    return name


class PackedWeight:
    """A weight matrix [rows, cols] in one of the formats."""

    __slots__ = ("cols", "format", "handle", "rows", "storage")

    def __init__(self, storage: Tensor, weight_format: WeightFormat, rows: int, cols: int) -> None:
        self.storage = storage
        self.format = weight_format
        self.rows = rows
        self.cols = cols
        self.handle: Any = _cpu.PackedMatrix(_FORMAT_CODES[weight_format], rows, cols, storage.data_ptr())

    @classmethod
    def pack(cls, weight: Tensor, weight_format: WeightFormat, order: Tensor | None = None) -> PackedWeight:
        """Pack a matrix; integer formats round to the nearest step.

        `order` [rows] int64 lists the source row that becomes each output, or -1 for zeros; None: all as they are.

        Shapes: weight [N, cols], float32, bfloat16 or float16.
        """
        if weight.dim() != 2 or weight.dtype not in _SOURCE_CODES:
            raise ValueError(f"a matrix of floats can be packed, not {_describe(weight)}")
        weight = weight.contiguous()
        order = _check_order(order, weight.shape[0])
        rows, cols = (weight.shape[0] if order is None else order.shape[0]), weight.shape[1]
        storage = allocate_lazily(_cpu.matrix_bytes(_FORMAT_CODES[weight_format], rows, cols))
        _pack_into(storage, weight, weight_format, order, rows)
        return cls(storage, weight_format, rows, cols)

    @classmethod
    def from_blocks(cls, blocks: Tensor, weight_format: WeightFormat, order: Tensor | None = None) -> PackedWeight:
        """Pack GGUF blocks without changing a value: Q8_0 into "int8", Q4_0 into "int4". `order` as in `pack`.

        Shapes: blocks [N, bytes of a row] uint8.
        """
        block_bytes = _BLOCK_BYTES.get(weight_format)
        if block_bytes is None or blocks.dim() != 2 or blocks.dtype != torch.uint8 or blocks.shape[1] % block_bytes:
            raise ValueError(f"rows of whole blocks can be packed, not {_describe(blocks)} as {weight_format}")
        blocks = blocks.contiguous()
        order = _check_order(order, blocks.shape[0])
        rows, cols = (blocks.shape[0] if order is None else order.shape[0]), blocks.shape[1] // block_bytes * GROUP_SIZE
        code = _FORMAT_CODES[weight_format]
        storage = allocate_lazily(_cpu.matrix_bytes(code, rows, cols))
        _cpu.pack_blocks(code, blocks.data_ptr(), cols, _address(order), rows, storage.data_ptr())
        return cls(storage, weight_format, rows, cols)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.storage.nbytes

    def unpack(self) -> Tensor:
        """Return the exact values: [rows, cols] float32."""
        out = torch.empty(self.rows, self.cols)
        _cpu.unpack(self.handle, out.data_ptr())
        return out

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {self.rows} x {self.cols})"


class PackedExperts:
    """The experts of a layer, each one's gate, up and down matrices side by side in memory."""

    __slots__ = ("down", "format", "gate_up", "handle", "hidden", "storage", "width")

    def __init__(self, storage: Tensor, weight_format: WeightFormat, num_experts: int, hidden: int, width: int) -> None:
        self.storage = storage
        self.format = weight_format
        self.hidden = hidden
        self.width = width
        up_bytes, down_bytes = _expert_bytes(weight_format, hidden, width)
        stride = up_bytes + down_bytes
        parts = [
            torch.split(storage[e * stride : (e + 1) * stride], [up_bytes, down_bytes]) for e in range(num_experts)
        ]
        self.gate_up = [PackedWeight(up, weight_format, 2 * _whole_bands(width), hidden) for up, _ in parts]
        self.down = [PackedWeight(down, weight_format, hidden, width) for _, down in parts]
        addresses = ([w.storage.data_ptr() for w in ups] for ups in (self.gate_up, self.down))
        self.handle: Any = _cpu.PackedExperts(_FORMAT_CODES[weight_format], hidden, width, *addresses)

    @classmethod
    def pack(cls, gate_up: Tensor, down: Tensor, weight_format: WeightFormat) -> PackedExperts:
        """Pack all experts of a layer.

        Shapes: gate_up [E, 2I, H] (gate rows first), down [E, H, I]; float32, bfloat16 or float16.
        """
        num_experts, hidden, width = down.shape
        if gate_up.shape != (num_experts, 2 * width, hidden) or {gate_up.dtype, down.dtype} - _SOURCE_CODES.keys():
            raise ValueError(f"experts do not fit together: {_describe(gate_up)} and {_describe(down)}")
        storage = allocate_lazily(num_experts * sum(_expert_bytes(weight_format, hidden, width)))
        packed = cls(storage, weight_format, num_experts, hidden, width)
        order = _interleaved(width)
        for expert in range(num_experts):
            target = packed.gate_up[expert]
            _pack_into(target.storage, gate_up[expert].contiguous(), weight_format, order, target.rows)
            _pack_into(packed.down[expert].storage, down[expert].contiguous(), weight_format, None, hidden)
        return packed

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return len(self.gate_up)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, filling included."""
        return self.storage.nbytes

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the exact values: gate_up [E, 2I, H] (gate rows first) and down [E, H, I], float32."""
        order = _interleaved(self.width)
        where = torch.empty(2 * self.width, dtype=torch.int64)
        where[order[order >= 0]] = (order >= 0).nonzero().flatten()
        gate_up = torch.stack([weight.unpack()[where] for weight in self.gate_up])
        return gate_up, torch.stack([weight.unpack() for weight in self.down])

    def __repr__(self) -> str:
        return f"PackedExperts({self.format}, {self.num_experts} of {self.hidden} x {self.width})"


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias + residual`.

    Shapes: x [T, cols], bias [rows], residual [T, rows] -> [T, rows]; all float32.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.cols or x.stride(1) != 1:
        raise ValueError(f"{weight} takes rows of {weight.cols} float32 values, not {_describe(x)}")
    num_rows = x.shape[0]
    if bias is not None:
        _check(bias, (weight.rows,), "bias")
    if residual is not None:
        _check(residual, (num_rows, weight.rows), "residual")
    out = torch.empty(num_rows, weight.rows)
    _cpu.linear(weight.handle, x.data_ptr(), num_rows, x.stride(0), _address(bias), _address(residual), out.data_ptr())
    return out


def experts(
    x: Tensor, packed: PackedExperts, topk_ids: Tensor, topk_weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return `residual` plus the weighted sum of each token's experts, `down(silu(gate(x)) * up(x))`.

    A token's experts are added in ascending order of their numbers, each of which must exist.

    Shapes: x and residual [T, hidden] float32, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, hidden].
    """
    num_tokens, top_k = topk_ids.shape
    _check(x, (num_tokens, packed.hidden), "x")
    _check(topk_weights, (num_tokens, top_k), "topk_weights")
    if topk_ids.dtype != torch.int64 or not topk_ids.is_contiguous():
        raise ValueError(f"topk_ids must be contiguous int64, not {_describe(topk_ids)}")
    if residual is not None:
        _check(residual, (num_tokens, packed.hidden), "residual")
    out = torch.empty(num_tokens, packed.hidden)
    _cpu.experts(
        packed.handle,
        x.data_ptr(),
        num_tokens,
        top_k,
        topk_ids.data_ptr(),
        topk_weights.data_ptr(),
        _address(residual),
        out.data_ptr(),
    )
    return out


def _check(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32 {list(shape)}, not {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {list(tensor.shape)}" + ("" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_order(order: Tensor | None, num_sources: int) -> Tensor | None:
    if order is None:
        return None
    if order.dtype != torch.int64 or order.dim() != 1:
        raise ValueError(f"an order of rows is a list of int64, not {_describe(order)}")
    if order.numel() and not (int(order.min()) >= -1 and int(order.max()) < num_sources):
        raise ValueError(f"an order of rows names rows beyond the {num_sources} there are")
    return order.contiguous()


def _pack_into(
    storage: Tensor, weight: Tensor, weight_format: WeightFormat, order: Tensor | None, num_rows: int
) -> None:
    _cpu.pack(
        _FORMAT_CODES[weight_format],
        _SOURCE_CODES[weight.dtype],
        weight.data_ptr(),
        weight.shape[1],
        _address(order),
        num_rows,
        storage.data_ptr(),
    )


def _whole_bands(rows: int) -> int:
    return -(-rows // _BAND) * _BAND


def _expert_bytes(weight_format: WeightFormat, hidden: int, width: int) -> tuple[int, int]:
    """Bytes of an expert's gate_up and down matrices."""
    code = _FORMAT_CODES[weight_format]
    return _cpu.matrix_bytes(code, 2 * _whole_bands(width), hidden), _cpu.matrix_bytes(code, hidden, width)


def _interleaved(width: int) -> Tensor:
    """Return the order that lays [gate; up] as bands in turn: gate 0..15, up 0..15, gate 16..31, ..."""
    unit = torch.arange(_whole_bands(width)).view(-1, 1, _BAND)
    return torch.where(unit < width, torch.cat([unit, unit + width], dim=1), -1).flatten()

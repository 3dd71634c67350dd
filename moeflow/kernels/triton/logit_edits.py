"""Changes of logits before sampling. The reference is `kernels/logit_edits.py`.

All numbers of the host come in one copy: 20 bytes for each changed token, and V / 8 bytes for each mask. A changed row
costs 8 V bytes of the GPU's memory: 1.2 MB at 152,064 tokens, or 0.3 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl
from numpy.typing import NDArray

from moeflow.kernels.device_arrays import staged
from moeflow.kernels.logit_edits import LogitEdits
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.launching import launch

if TYPE_CHECKING:
    from torch import Tensor

_COPY_BLOCK: Final = 4096  # tokens of a program: 38 programs a row at 152,064 tokens
_EDIT_BLOCK: Final = 256


@triton.jit
def copy_allowed_kernel(
    logits_ptr,
    row_stride,
    rows_ptr,
    mask_of_ptr,
    masks_ptr,
    mask_bytes,
    vocab_size,
    out_ptr,
    block: tl.constexpr,
):
    """Copy a block of a row, with -inf for the tokens that its mask bars.

    Shapes: logits [R, V] in rows of `row_stride`; rows and mask_of [E]; masks [M, mask_bytes] uint8; out [E, V].
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + number).to(tl.int64)
    mask = tl.load(mask_of_ptr + number).to(tl.int64)
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = tokens < vocab_size
    x = tl.load(logits_ptr + row * row_stride + tokens, mask=is_inside, other=0.0)
    bits = tl.load(masks_ptr + mask * mask_bytes + tokens // 8, mask=is_inside & (mask >= 0), other=255)
    is_allowed = (bits.to(tl.int32) >> (tokens % 8)) & 1
    tl.store(out_ptr + number * vocab_size + tokens, tl.where(is_allowed != 0, x, -float("inf")), mask=is_inside)


@triton.jit(do_not_specialize=["num_places"])
def edit_tokens_kernel(places_ptr, amounts_ptr, num_places, vocab_size, out_ptr, block: tl.constexpr):
    """Change a block of single tokens in place. Shapes: places [2, n]; amounts [3, n]; out [E, V]."""
    entries = tl.program_id(0) * block + tl.arange(0, block)
    is_inside = entries < num_places
    row = tl.load(places_ptr + entries, mask=is_inside, other=0).to(tl.int64)
    token = tl.load(places_ptr + num_places + entries, mask=is_inside, other=0)
    bias = tl.load(amounts_ptr + entries, mask=is_inside, other=0.0)
    penalty = tl.load(amounts_ptr + num_places + entries, mask=is_inside, other=1.0)
    loss = tl.load(amounts_ptr + 2 * num_places + entries, mask=is_inside, other=0.0)
    at = out_ptr + row * vocab_size + token
    x = tl.load(at, mask=is_inside, other=0.0) + bias
    x = tl.where(x > 0, tl.div_rn(x, penalty), x * penalty) - loss
    tl.store(at, x, mask=is_inside)


def edited(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Compute `kernels.logit_edits.edited` in two launches, or in one if no single token changes.

    Shapes: [R, V] float32 -> [E, V].
    """
    arrays: list[NDArray[Any]] = [edits.rows, edits.places, edits.amounts, edits.mask_of, edits.masks]
    rows, places, amounts, mask_of, masks = staged(arrays, logits.device)
    vocab_size, num_places = logits.shape[1], edits.places.shape[1]
    out = torch.empty(len(edits.rows), vocab_size, dtype=logits.dtype, device=logits.device)
    launch(
        copy_allowed_kernel,
        (len(edits.rows), triton.cdiv(vocab_size, _COPY_BLOCK)),
        logits,
        logits.stride(0),
        rows,
        mask_of,
        masks,
        masks.shape[1],
        vocab_size,
        out,
        block=_COPY_BLOCK,
        num_warps=4,
    )
    if num_places:
        launch(
            edit_tokens_kernel,
            (triton.cdiv(num_places, _EDIT_BLOCK),),
            places,
            amounts,
            num_places,
            vocab_size,
            out,
            block=_EDIT_BLOCK,
            num_warps=2,
            enable_fp_fusion=False,  # each step rounds, as it does on the host
        )
    return out

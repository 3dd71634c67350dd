"""Changes of logits before sampling: of single tokens, and masks of the tokens that may follow.

`kernels/triton/logit_edits.py` has them for GPUs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.kernels.arrays import on_host

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]


class LogitEdits(msgspec.Struct, frozen=True):
    """Changes of E rows of logits: n of single tokens, and M masks."""

    rows: Ints  # [E]: which rows of the logits are changed
    places: Ints  # [2, n]: the number of the changed row, and the token. Each pair comes once.
    amounts: Floats  # [3, n]: the bias that is added, the repetition penalty, and the loss that is subtracted
    mask_of: Ints  # [E]: the number of the row's mask; -1: none
    masks: NDArray[np.uint8]  # [M, ceil(V / 8)]: a bit for each token, the lowest first


def edited(logits: Any, edits: LogitEdits) -> Floats:
    """Return changed copies of rows: x + bias; over the penalty if positive, else times it; minus the loss.

    Tokens outside a row's mask become -inf. Shapes: logits [R, V] float32 -> [E, V].
    """
    out: Floats = on_host(logits)[edits.rows]
    row, token = edits.places
    bias, penalty, loss = edits.amounts
    values = out[row, token] + bias
    out[row, token] = np.where(values > 0, values / penalty, values * penalty) - loss
    for x, mask in zip(out, edits.mask_of, strict=True):
        if mask >= 0:
            bits = np.unpackbits(edits.masks[mask], count=out.shape[1], bitorder="little").view(np.bool_)
            np.copyto(x, -np.inf, where=~bits)
    return out

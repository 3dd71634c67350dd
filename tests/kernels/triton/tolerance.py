"""How far a kernel's numbers may lie from float64's."""

import torch

RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerances for `torch.testing.assert_close`, of outputs of size 1 or so."""
    return {"rtol": RELATIVE[dtype], "atol": RELATIVE[dtype]}

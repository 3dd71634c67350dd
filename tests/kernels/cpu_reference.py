"""What the CPU kernels promise, in float64: how activations are prepared, and how far a result may be off.

Weights stand for exact values (`unpack`), int8 activations for exact values too once they are quantized. What is
left is rounding: each of the n operations of a sum errs by at most 2**-24 of the sum of magnitudes |w| |x|.
"""

import torch
from torch.nn import functional as F

from moeflow.kernels import cpu
from moeflow.kernels.activation import apply

FORMATS = ("float32", "bfloat16", "int8", "int4")
GROUP = 32
UNIT = 2.0**-24  # relative error of one float32 operation
TINY = 1e-30  # results this small may be rounded to zero


def is_integer(weight_format):
    return weight_format in ("int8", "int4")


def groups(x):
    """Cut the last dimension, filled up with zeros, into groups: [..., G, 32]."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def prepared(x, weight_format, isa, slack=0.0):
    """Return (the values [T, K] that a kernel computes with, by how much they may differ), both float64.

    They may differ only if x is known to a relative error `slack`, and then mostly where it rounds either way.
    """
    if is_integer(weight_format):
        values, unsure = (part.flatten(-2)[..., : x.shape[-1]] for part in _quantized(groups(x.float()), slack))
        return values, unsure
    if weight_format == "bfloat16" and isa == "avx512_bf16":
        low, high = ((x.double() * (1 + side)).float().bfloat16().double() for side in (-slack, slack))
        return x.float().bfloat16().double(), (high - low).abs()
    return x.double(), x.double().abs() * slack


def _quantized(x, slack):
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest >= 1e-36, torch.full_like(largest, 127) / largest, 0.0)  # `127 / x` rounds twice
    scaled = x * inverse
    q, scale = scaled.round().double(), (largest / 127).double()
    may_flip = ((scaled.double() % 1 - 0.5).abs() <= 4 * 127 * slack) & (slack > 0)
    return q * scale, q.abs() * scale * 2 * slack + may_flip * scale


def num_roundings(weight_format, cols):
    """How often a kernel rounds on the way to one result."""
    return -(-cols // GROUP) + 3 if is_integer(weight_format) else cols + 2


def product(values, unsure, weight, weight_format):
    """Return (values @ weight.T, by how much a kernel's result may differ)."""
    weight = weight.double()
    error = num_roundings(weight_format, weight.shape[1]) * UNIT
    return values @ weight.T, values.abs() @ weight.T.abs() * error + unsure @ weight.T.abs() + TINY


def linear(x, weight, isa):
    """Return (x @ weight.T, by how much a kernel's result may differ), for a PackedWeight."""
    return product(*prepared(x, weight.format, isa), weight.unpack(), weight.format)


def experts(x, packed, topk_ids, topk_weights, isa):
    """Return (the expert layer's output, by how much a kernel's result may differ), for PackedExperts.

    Gate and up come from `cpu.linear`, which is tested against float64 on its own: an error in them, however
    small, can decide how the next product's int8 input is rounded.
    """
    ups_of, downs = packed.gate_up, packed.down
    out = torch.zeros(x.shape[0], packed.hidden, dtype=torch.float64)
    error = torch.full_like(out, TINY)
    for expert in range(packed.num_experts):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        bias = None if packed.up_bias is None else packed.up_bias[expert]
        bands = cpu.linear(x[tokens], ups_of[expert], bias).unflatten(1, (-1, 2 if packed.is_gated else 1, 16))
        parts = (part.flatten(1)[:, : packed.width].double() for part in bands.unbind(2))  # gate and up in turn
        units = apply(packed.function, next(parts))
        for up in parts:
            units = units * up
        values, unsure = prepared(units, packed.format, isa, slack=8 * UNIT)
        result, off = product(values, unsure, downs[expert].unpack(), packed.format)
        if packed.down_bias is not None:
            result = result + packed.down_bias[expert]
        weights = topk_weights[tokens, slots].double().unsqueeze(1)
        out.index_add_(0, tokens, result * weights)
        error.index_add_(0, tokens, (off + result.abs() * (topk_ids.shape[1] + 2) * UNIT) * weights.abs())
    return out, error


def assert_within(got, want, error):
    """Fail where `got` is further from `want` than `error`."""
    assert got.shape == want.shape
    off = (got.double() - want).abs()
    assert bool((off <= error).all()), f"{(off / error).max():.3g} times the error that rounding explains"

"""What the CPU kernels promise, in float64: how activations are prepared, and how far a result may be off.

Weights stand for exact values (`unpack`), integer activations for exact values too once they are quantized. Only
rounding is left: each of the n operations of a sum errs by at most 2**-24 of the sum of magnitudes |w| |x|.

A *form* is a format, and for integers whether they meet activations of 16 bits: "int8 wide".
"""

import torch
from torch.nn import functional as F

from moeflow.kernels.activation import activate
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import DTYPES, MADE_FORMATS, QUANTIZED
from moeflow.kernels.weight_format import FORMATS as RECORDS

FORMATS = (*MADE_FORMATS, *(f"{name} wide" for name in (*QUANTIZED, "int4-min")))
GROUP = 32
STEP = 16  # as few values share a scale in some blocks
UNIT = 2.0**-24  # relative error of one float32 operation
TINY = 1e-30  # results this small may be rounded to zero
ROUNDING_ISAS = ("avx512_bf16", "amx", "neon_i8mm")  # beside bfloat16 weights they round activations to it, too


def pack_weight(weight, form, order=None):
    """Return a matrix of floats packed in a form."""
    weight_format, *wide = form.split()
    return PackedWeight.pack(weight, weight_format, order, is_wide=bool(wide))


def pack_experts(gate_up, down, form, **kind):
    """Return a layer's experts packed in a form."""
    weight_format, *wide = form.split()
    return PackedExperts.pack(gate_up, down, weight_format, is_wide=bool(wide), **kind)


def max_of(packed):
    """Return the largest integer that activations become beside a weight; None: they stay floats."""
    return None if packed.format in (*DTYPES, "fp8") else 32767 if packed.is_wide else 127


def has_blocks(packed):
    """Whether it is in a format that only files have."""
    return not RECORDS[packed.format].is_made


def groups(x):
    """Cut the last dimension, filled up with zeros, into groups: [..., G, 32]."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def prepared(x, packed, isa, slack=0.0):
    """Return (the values [T, K] that a kernel computes with, by how much they may differ), both float64.

    They may differ only if x is known to a relative error `slack`, and then mostly where it rounds either way.
    """
    most = max_of(packed)
    if most is not None:
        values, unsure = (part.flatten(-2)[..., : x.shape[-1]] for part in _quantized(groups(x.float()), most, slack))
        return values, unsure
    if packed.format in ("bfloat16", "fp8") and isa in ROUNDING_ISAS:
        low, high = ((x.double() * (1 + side)).float().bfloat16().double() for side in (-slack, slack))
        return x.float().bfloat16().double(), (high - low).abs()
    return x.double(), x.double().abs() * slack


def _quantized(x, most, slack):
    largest = x.abs().amax(-1, keepdim=True)
    tiny = 1e-36 if most == 127 else 1e-33
    inverse = torch.where(largest >= tiny, torch.full_like(largest, most) / largest, 0.0)  # `127 / x` rounds twice
    scaled = x * inverse
    q, scale = scaled.round().double(), (largest / most).double()
    may_flip = ((scaled.double() % 1 - 0.5).abs() <= 4 * most * slack) & (slack > 0)
    return q * scale, q.abs() * scale * 2 * slack + may_flip * scale


def num_roundings(packed):
    """How often a kernel rounds on the way to one result."""
    num_groups = -(-packed.cols // GROUP)
    if packed.format == "fp8":
        return packed.cols + 2 * num_groups + 2  # sums of 128, and those times their scales
    if has_blocks(packed):
        return 2 * -(-packed.cols // STEP) + 6  # as the next, in steps
    if packed.format == "int4-min":
        return 2 * num_groups + 5  # twice a group, and once or twice where sums of integers become floats
    return packed.cols + 2 if max_of(packed) is None else num_groups + 4


def product(values, unsure, packed):
    """Return (values @ weight.T, by how much a kernel's result may differ)."""
    weight = packed.unpack().double()
    sizes = weight.abs()
    if packed.format == "int4-min" or has_blocks(
        packed
    ):  # steps above the minimum and the minimum are multiplied each for itself
        sizes = (3 * groups(sizes).amax(-1, keepdim=True)).expand(-1, -1, GROUP).flatten(1)[:, : packed.cols]
    error = num_roundings(packed) * UNIT
    return values @ weight.T, values.abs() @ sizes.T * error + unsure @ weight.T.abs() + TINY


def linear(x, weight, isa):
    """Return (x @ weight.T, by how much a kernel's result may differ), for a PackedWeight."""
    return product(*prepared(x, weight, isa), weight)


def experts(x, packed, topk_ids, topk_weights, isa):
    """Return (the expert layer's output, by how much a kernel's result may differ), for PackedExperts.

    Gate and up come from `cpu.linear`, which has its own tests against float64. Even a small error in them can change
    the rounding of the next product's int8 input.
    """
    ups_of, downs = packed.gate_up, packed.down
    out = torch.zeros(x.shape[0], packed.hidden, dtype=torch.float64)
    error = torch.full_like(out, TINY)
    for expert in range(packed.num_experts):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        bands = extension.linear(x[tokens], ups_of[expert]).unflatten(1, (-1, packed.kind.num_ups, 16))
        parts = [part.flatten(1)[:, : packed.width] for part in bands.unbind(2)]  # gate and up alternate
        if packed.biases is not None:
            parts = [part + bias for part, bias in zip(parts, packed.biases.up[expert].chunk(len(parts)), strict=True)]
        units = activate(packed.kind.function, torch.cat(parts, dim=1).double(), is_gated=packed.kind.is_gated)
        values, unsure = prepared(units, downs[expert], isa, slack=8 * UNIT)
        result, off = product(values, unsure, downs[expert])
        if packed.biases is not None:
            result = result + packed.biases.down[expert]
        weights = topk_weights[tokens, slots].double().unsqueeze(1)
        out.index_add_(0, tokens, result * weights)
        error.index_add_(0, tokens, (off + result.abs() * (topk_ids.shape[1] + 2) * UNIT) * weights.abs())
    return out, error


def assert_within(got, want, error):
    """Fail where `got` is further from `want` than `error`."""
    assert got.shape == want.shape
    off = (got.double() - want).abs()
    assert bool((off <= error).all()), f"{(off / error).max():.3g} times the error that rounding explains"

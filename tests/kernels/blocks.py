"""GGUF blocks of random bytes, and what gguf's own reader makes of them."""

import gguf
import numpy as np
import torch

from moeflow.kernels.cpu.packed_weights import PackedExperts, PackedWeight
from moeflow.kernels.weight_format import ALL_FORMATS, FORMATS

BLOCK_FORMATS = tuple(name for name in ALL_FORMATS if not FORMATS[name].is_made)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # where fp16 numbers are, unless:
IN_FRONT = {"Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2)}
EXTREMES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0)


def kind_of(weight_format):
    """Return the one kind of blocks that a format holds."""
    (kind,) = FORMATS[weight_format].keeps
    return kind


def columns_of(kind):
    """Return what the columns of such blocks are a multiple of."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def random_blocks(kind, rows, cols, seed=0, *, is_extreme=False, largest_scale=1 / 512):
    """Return [rows, bytes of a row] uint8: any bits, but for scales that give values of about 1, or extreme ones."""
    random = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = rows * cols // size
    blocks = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(0, 256, count) if is_extreme else random.integers(120, 128, count)
    for place in HALVES.get(kind, IN_FRONT.get(kind, (0,))):
        scales = random.choice(EXTREMES, count) if is_extreme else random.uniform(-1, 1, count) * largest_scale
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


def values_of(kind, blocks):
    """Return [rows, cols] float32."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def block_weight(weight_format, rows, cols, seed=0):
    """Return a matrix of random blocks."""
    kind = kind_of(weight_format)
    weight = PackedWeight.allocate(rows, cols, weight_format)
    weight.fill(random_blocks(kind, rows, cols, seed), torch.arange(rows), kind)
    return weight


def block_experts(weight_format, num_experts, hidden, width):
    """Return a layer's experts of random blocks."""
    kind = kind_of(weight_format)
    experts = PackedExperts(num_experts, hidden, width, weight_format)
    for number, parts in enumerate(experts.parts()):
        for place, part in enumerate(parts):
            part.fill(random_blocks(kind, *part.shape, 3 * number + place), torch.arange(part.shape[0]), kind)
    return experts

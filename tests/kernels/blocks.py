"""Blocks of random bytes, and their values: GGUF's by gguf's own reader, all others by numpy."""

import gguf
import numpy as np
import torch

from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.cpu.packed_weight import PackedWeight
from moeflow.kernels.weight_format import ALL_FORMATS, FORMATS, GROUP_KINDS, LEVEL_KINDS

BLOCK_FORMATS = tuple(name for name in ALL_FORMATS if not FORMATS[name].is_made)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # where fp16 numbers are, unless:
IN_FRONT = {"Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2)}
GROUPS = {"INT4_G128": 128, "INT4_G64": 64, "INT4_G32": 32, "INT8_G128": 128, "F8_E4M3": 128, "NVFP4": 32}  # of a block
FILE_BITS = {"INT4_G128": 4 + 20 / 128, "INT4_G64": 4 + 20 / 64, "INT4_G32": 4 + 20 / 32, "INT8_G128": 8, "F8_E4M3": 8}
FILE_BITS["NVFP4"] = 4.5
HEAD = 4  # bytes before a block's codes
NVFP4_PARTS = [4, 2, 16]  # bytes of a row's factor, of scales, of codes, two a byte
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = {  # values that share a small scale, what scales go up by, and levels without their signs
    "LEVELS_IQ2": (16, 1 / 8, [8, 25, 43, 1, 7, 9, 0, 0]),
    "LEVELS_IQ3_XXS": (32, 1 / 2, [2, 6, 10, 14, 18, 22, 26, 31]),
    "LEVELS_IQ3_S": (32, 1, [1, 3, 5, 7, 9, 11, 13, 15]),
}
LEVEL_COLUMNS = 256
IS_BF16 = 1 << 15  # beside a zero point
EXTREMES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0)


def kind_of(weight_format):
    """Return the one kind of blocks that a format holds."""
    (kind,) = FORMATS[weight_format].keeps
    return kind


def columns_of(kind):
    """Return what the columns of such blocks are a multiple of."""
    return GROUPS[kind] if kind in GROUP_KINDS else _size_of(kind)[0]


def _size_of(kind):
    """Return values and bytes of a block of GGUF's, or of levels."""
    if kind in LEVEL_KINDS:
        return LEVEL_COLUMNS, 2 + LEVEL_COLUMNS // LEVELS[kind][0] + LEVEL_COLUMNS // 2
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def bytes_in_file(kind, rows, cols):
    """Return what so many values take in files that have such blocks, or what these are made of."""
    if kind in GROUP_KINDS:
        return FILE_BITS[kind] * rows * cols / 8
    size, num_bytes = _size_of(kind)
    return rows * cols // size * num_bytes


def random_blocks(kind, rows, cols, seed=0, *, is_extreme=False, largest_scale=1 / 512):
    """Return [rows, bytes of a row] uint8: any bits, but for scales that give values of about 1, or extreme ones."""
    random = np.random.default_rng(seed)
    if kind == "NVFP4":
        return _random_nvfp4(rows, cols, random, is_extreme, largest_scale)
    if kind in GROUP_KINDS:
        return torch.from_numpy(
            _random_groups(kind, rows * cols // GROUPS[kind], random, is_extreme, largest_scale).reshape(rows, -1)
        )
    size, num_bytes = _size_of(kind)
    count = rows * cols // size
    blocks = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(0, 256, count) if is_extreme else random.integers(120, 128, count)
    for place in HALVES.get(kind, IN_FRONT.get(kind, (0,))):
        scales = random.choice(EXTREMES, count) if is_extreme else random.uniform(-1, 1, count) * largest_scale
        halves = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
        if kind == "IQ1_M":  # four bits of it in the high half of every second of the last eight bytes
            nibbles = np.stack([halves & 15, halves >> 4], axis=2).reshape(count, 4)
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | nibbles << 4
        else:
            blocks[:, place : place + 2] = halves
    return torch.from_numpy(blocks.reshape(rows, -1))


def values_of(kind, blocks):
    """Return [rows, cols] float32."""
    if kind == "NVFP4":
        return _values_of_nvfp4(blocks)
    if kind in GROUP_KINDS:
        return _values_of_groups(kind, blocks.numpy())
    if kind in LEVEL_KINDS:
        return _values_of_levels(kind, blocks.numpy())
    with np.errstate(over="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def _random_groups(kind, count, random, is_extreme, largest_scale):
    """Return [count, bytes of a block]; scales are now fp16, now bfloat16, and of float8 float32."""
    scales = random.choice(EXTREMES, count) if is_extreme else random.uniform(-1, 1, count)
    shape = (count, GROUPS[kind])
    if kind == "F8_E4M3":
        codes = random.integers(0, 255, shape, dtype=np.uint8)
        codes[(codes & 127) == 127] = 126  # no NaN
        heads = (scales / (1 if is_extreme else 256)).astype(np.float32)[:, None]
        return np.concatenate([heads.view(np.uint8), codes], axis=1)
    bits = int(kind[3])
    floats = torch.from_numpy(scales * (1 if is_extreme else largest_scale * 64 / 2**bits)).float()
    halves, brain = (floats.to(dtype).view(torch.int16).numpy() for dtype in (torch.float16, torch.bfloat16))
    is_bf16 = random.integers(0, 2, count)
    zeros = random.integers(0, 2**bits + 1, count) | is_bf16 * IS_BF16
    heads = np.stack([np.where(is_bf16, brain, halves).view(np.uint16), zeros.astype(np.uint16)], axis=1)
    return np.concatenate([heads.view(np.uint8), random.integers(0, 2**bits, shape, dtype=np.uint8)], axis=1)


def _values_of_groups(kind, rows):
    blocks = torch.from_numpy(rows).view(len(rows), -1, HEAD + GROUPS[kind])
    heads, codes = blocks[..., :HEAD].contiguous(), blocks[..., HEAD:].contiguous()
    if kind == "F8_E4M3":
        return (codes.view(torch.float8_e4m3fn).float() * heads.view(torch.float32)).flatten(1)
    scales, marked = heads.view(torch.int16).split(1, dim=-1)
    as_bf16, as_half = (scales.contiguous().view(dtype).float() for dtype in (torch.bfloat16, torch.float16))
    steps = codes.float() - (marked & (IS_BF16 - 1))
    return (steps * torch.where(marked < 0, as_bf16, as_half)).flatten(1)


def _random_nvfp4(rows, cols, random, is_extreme, largest_scale):
    """Return blocks with a factor for each row; half of the rows have a divisor, told by its sign."""
    codes, scales = (random.integers(0, most, (rows, cols // 32, num), np.uint8) for most, num in ((255, 16), (127, 2)))
    factors = random.choice(EXTREMES, rows) if is_extreme else random.uniform(0.5, 1, rows) * largest_scale / 4
    divides = random.integers(0, 2, rows) * (not is_extreme) != 0
    factors = np.where(divides, -1 / np.where(divides, factors, 1), factors).astype(np.float32)
    heads = np.broadcast_to(factors[:, None, None], (rows, cols // 32, 1)).copy().view(np.uint8)
    return torch.from_numpy(np.concatenate([heads, scales, codes], axis=2).reshape(rows, -1))


def _values_of_nvfp4(blocks):
    parts = blocks.view(len(blocks), -1, sum(NVFP4_PARTS)).split(NVFP4_PARTS, dim=2)
    factors, scales, codes = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    factors, scales = factors.view(torch.float32), scales.view(torch.float8_e4m3fn).float()
    scales = torch.where(factors < 0, scales / -factors, scales * factors)
    levels = torch.tensor([*E2M1, *(-it for it in E2M1)])
    values = levels[torch.stack([codes % 16, codes // 16], dim=-1).int()]
    return (values.view(*scales.shape, 16) * scales[..., None]).flatten(1)


def _values_of_levels(kind, rows):
    share, unit, levels = LEVELS[kind]
    num_scales = LEVEL_COLUMNS // share
    blocks = rows.reshape(-1, _size_of(kind)[1])
    scales, small, codes = np.split(blocks, [2, 2 + num_scales], axis=1)
    codes = codes.reshape(len(blocks), -1, 1, 16)
    codes = np.concatenate([codes & 15, codes >> 4], axis=2).reshape(len(blocks), num_scales, share)
    steps = np.array([*levels, *(-it for it in levels)], np.float32)[codes]
    halves = np.ascontiguousarray(scales).view(np.float16).astype(np.float32) * np.float32(unit)
    values = steps * (halves * np.ascontiguousarray(small).view(np.int8).astype(np.float32))[..., None]
    return torch.from_numpy(values.reshape(len(rows), -1))


def filled_blocks(kind, rows, cols, byte):
    """Return blocks whose codes and small scales are all this byte; large scales are as random blocks have them."""
    one, other = (random_blocks(kind, rows, cols, is_extreme=is_extreme) for is_extreme in (False, True))
    if kind == "NVFP4":
        _, scales, codes = one.view(rows, -1, sum(NVFP4_PARTS)).split(NVFP4_PARTS, dim=2)
        scales.fill_(min(byte, 126))
        codes.fill_(byte)
        return one
    if kind not in GROUP_KINDS:
        return torch.where(one == other, torch.full_like(one, byte), one)
    code = 126 | byte & 128 if kind == "F8_E4M3" else byte % 2 ** int(kind[3])
    one.view(-1, HEAD + GROUPS[kind])[:, HEAD:] = code
    return one


def block_weight(weight_format, rows, cols, seed=0, *, is_wide=False):
    """Return a matrix of random blocks."""
    kind = kind_of(weight_format)
    weight = PackedWeight.allocate(rows, cols, weight_format, is_wide=is_wide)
    weight.fill(random_blocks(kind, rows, cols, seed), torch.arange(rows), kind)
    return weight


def block_experts(weight_format, num_experts, hidden, width, *, is_wide=False):
    """Return a layer's experts of random blocks."""
    kind = kind_of(weight_format)
    experts = PackedExperts(num_experts, hidden, width, weight_format, is_wide=is_wide)
    for number, parts in enumerate(experts.parts()):
        for place, part in enumerate(parts):
            part.fill(random_blocks(kind, *part.shape, 3 * number + place), torch.arange(part.shape[0]), kind)
    return experts

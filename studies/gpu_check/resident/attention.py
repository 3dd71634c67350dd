"""Times attention of decode passes over long contexts, beside torch's attention over K and V gathered before."""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeflow.kernels.attention.attention import attend
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from studies.gpu_check.findings import Findings
from studies.gpu_check.resident.accuracy import relative_error
from studies.gpu_check.resident.attention_checks import BLOCK_SIZE, make_blocks
from studies.gpu_check.resident.target import Target

CACHE_BYTES = 256 << 20  # more than a GPU's cache: calls read so much different memory
LIMIT = 3.2e-2  # of the relative difference
# Without cuDNN, which builds a plan for each length.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]


def run(options: argparse.Namespace, findings: Findings) -> None:
    """Note microseconds of both, and the share of the device's bandwidth."""
    target = Target(options)
    sizes = (
        _Sizes(4, 2, 16, (40,), (1, 2)) if target.is_rehearsal else _Sizes(32, 4, 128, (4096, 16384, 32768), (1, 16))
    )
    read_bytes_per_s = target.ceilings().read_bytes_per_s
    with torch.inference_mode():
        for context in sizes.contexts:
            for batch in sizes.batches:
                _time(target, findings, sizes, context, batch, read_bytes_per_s)


def _time(target: Target, findings: Findings, sizes: _Sizes, context: int, batch: int, read_bytes_per_s: float) -> None:
    num_bytes = 2 * 2 * batch * context * sizes.kv_heads * sizes.head_dim
    num_copies = 1 if target.is_rehearsal else max(math.ceil(CACHE_BYTES / num_bytes), 4)
    q = torch.randn(batch, sizes.heads, sizes.head_dim, device=target.device).bfloat16()
    copies = [_stored(target, sizes, context, batch) for _ in range(num_copies)]
    gathered = [_gathered(*copy, context) for copy in copies]
    ours = [partial(attend, q, blocks, metadata) for metadata, blocks in copies]
    torchs = [partial(_by_torch, q, *halves) for halves in gathered]
    with target.kernels():
        error = relative_error(ours[0]().view(batch, sizes.heads, -1), torchs[0]())
        ours_s = target.seconds_per_call(ours)
    torchs_s = target.seconds_per_call(torchs)
    share = num_bytes / ours_s / read_bytes_per_s
    name = f"context {context}, batch {batch}"
    found = {"us": 1e6 * ours_s, "torch_us": 1e6 * torchs_s, "share_of_bandwidth": share, "difference": error}
    findings.note(**{name: {key: round(value, 4) for key, value in found.items()}})
    beside = f"torch {1e6 * torchs_s:.1f} us, {torchs_s / ours_s:.2f} times as long; {share:.0%} of bandwidth"
    findings.row(name, f"{1e6 * ours_s:.1f} us", beside)
    if not error <= LIMIT:
        findings.fault(f"{name}: differs from torch by {error:.1e}")


def _stored(target: Target, sizes: _Sizes, context: int, batch: int) -> tuple[AttentionMetadata, KVBlocks]:
    """Return random K and V of sequences, whose blocks lie in random order."""
    per_sequence = math.ceil(context / BLOCK_SIZE)
    order = torch.randperm(batch * per_sequence).view(batch, per_sequence).tolist()
    shape = {"num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    blocks = make_blocks(target.device, batch * per_sequence, "bfloat16", **shape)
    for stored in (blocks.keys, blocks.values):
        stored.normal_()
    metadata = AttentionMetadata.build(
        starts=[context - 1] * batch,
        num_tokens=[1] * batch,
        block_ids=order,
        block_size=BLOCK_SIZE,
        device=target.device,
    )
    metadata.device_table  # noqa: B018 - copied now, as a graph cannot
    return metadata, blocks


def _gathered(metadata: AttentionMetadata, blocks: KVBlocks, context: int) -> tuple[Tensor, Tensor]:
    """Return the sequences' K and V in a row: [B, KV, S, D] each."""
    halves = []
    for span in metadata.spans:
        block_ids = torch.tensor(span.block_ids, device=blocks.keys.device)
        halves.append(blocks.read(block_ids, torch.bfloat16))
    keys, values = (torch.stack(half)[:, :, :context].contiguous() for half in zip(*halves, strict=True))
    return keys, values


def _by_torch(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with sdpa_kernel(_BACKENDS):
        out = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
    return out[:, :, 0]

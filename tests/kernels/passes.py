"""Made-up passes for attention, and their results from a loop over tokens and heads in float64."""

import random

import torch

from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks, kv_block_bytes
from moeflow.kernels.lazy_memory import allocate_lazily


def make_blocks(num_blocks, *, dtype=torch.float32, block_size=16, num_kv_heads=2, head_dim=8, latent_dim=0):
    shape = {
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
        "latent_dim": latent_dim,
    }
    return KVBlocks(allocate_lazily(num_blocks * kv_block_bytes(dtype, **shape)), dtype, **shape)


class Pass:
    """Sequences with random K and V, part of them in the cache already, the rest in this pass."""

    def __init__(
        self,
        spans,
        *,
        heads=(4, 2),
        head_dim=8,
        latent_dim=0,
        block_size=4,
        seed=0,
        dtype=torch.float32,
        kv_dtype=None,
        masks=None,
    ):
        """Take (start, num_tokens) of each sequence; masks: a list of tree masks, or None, for each.

        With `latent_dim`, values are the first so many dimensions of keys.
        """
        torch.manual_seed(seed)
        self.spans = spans
        self.block_size = block_size
        self.masks = masks
        num_heads, num_kv_heads = heads
        stops = [start + count for start, count in spans]
        self.keys = [torch.randn(stop, num_kv_heads, head_dim).to(dtype) for stop in stops]
        self.values = [torch.randn(stop, num_kv_heads, head_dim).to(dtype) for stop in stops]
        self.latent_dim = latent_dim
        if latent_dim:
            self.values = [keys[..., :latent_dim] for keys in self.keys]
        self.queries = [torch.randn(count, num_heads, head_dim).to(dtype) for _, count in spans]
        needs = [-(-stop // block_size) for stop in stops]
        ids = list(range(sum(needs) + 3))
        random.Random(seed).shuffle(ids)
        self.block_ids = [[ids.pop() for _ in range(need)] for need in needs]
        self.blocks = make_blocks(
            sum(needs) + 3,
            dtype=kv_dtype or dtype,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            latent_dim=latent_dim,
        )

    def slots(self, i, positions):
        ids = self.block_ids[i]
        return torch.tensor(
            [ids[p // self.block_size] * self.block_size + p % self.block_size for p in positions], dtype=torch.int64
        )

    def write(self, write):
        """Put all K and V into the cache: write(k, v, slots), v being None where values are a part of keys."""
        for i, (start, count) in enumerate(self.spans):
            values = None if self.latent_dim else self.values[i]
            write(self.keys[i], values, self.slots(i, range(start + count)))

    def metadata(self):
        masks = None
        if self.masks is not None:
            listed = [m or [-1] * count for m, (_, count) in zip(self.masks, self.spans, strict=True)]
            masks = torch.tensor([m for sequence in listed for m in sequence], dtype=torch.int64)
        return AttentionMetadata.build(
            starts=[start for start, _ in self.spans],
            num_tokens=[count for _, count in self.spans],
            block_ids=self.block_ids,
            block_size=self.block_size,
            device="cpu",
            tree_masks=masks,
        )

    def sees(self, i, token, window):
        """List the positions that a token of sequence i sees."""
        start, count = self.spans[i]
        position, tree_begin = start + token, start + count - 64
        seen = list(range(position + 1))
        if self.masks is not None and self.masks[i] is not None:
            mask = self.masks[i][token]
            seen = [p for p in seen if p < tree_begin or mask >> (p - tree_begin) & 1]
        return seen if window is None else seen[-window:]

    def expected(self, i, window=None, scale=None, soft_cap=None, sinks=None):
        """Return sequence i's result [n, Q * D], token by token, head by head."""
        count = self.spans[i][1]
        num_heads, head_dim = self.queries[i].shape[1:]
        share = num_heads // self.keys[i].shape[1]
        out = torch.empty(count, num_heads, self.values[i].shape[-1], dtype=torch.float64)
        for token in range(count):
            seen = torch.tensor(self.sees(i, token, window))
            for head in range(num_heads):
                keys, values = (kv[i][seen, head // share].double() for kv in (self.keys, self.values))
                scores = keys @ self.queries[i][token, head].double() * (head_dim**-0.5 if scale is None else scale)
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[token, head] = weights / total @ values
        return out.flatten(1)

    def check(self, out, window=None, tolerance=1e-5, **scores):
        """Hold a result [T, Q * D] against the loop."""
        for i, got in enumerate(out.split([count for _, count in self.spans])):
            torch.testing.assert_close(got.double(), self.expected(i, window, **scores), atol=tolerance, rtol=tolerance)

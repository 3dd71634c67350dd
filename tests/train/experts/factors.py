"""Random factors of experts."""

import torch
from safetensors.torch import save_file

from moeflow.train.experts.adapters import DOWN, MATRICES, Adapters, factor_names
from tests.tiny_llama import HIDDEN, LAYERS

INNER = 48  # of the tiny Llama


def random_adapters(num_experts, rank, seed=0, *, hidden=HIDDEN, inner=INNER):
    """Return factors of so many experts, for two layers."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in range(LAYERS):
        for matrix in MATRICES:
            num_in, num_out = (inner, hidden) if matrix == DOWN else (hidden, inner)
            a, b = factor_names(layer, matrix)
            factors[a] = torch.randn(num_experts, num_in, rank, generator=generator)
            factors[b] = torch.randn(num_experts, rank, num_out, generator=generator)
    return Adapters(factors)


def save_branch(file, seed):
    """Write one finished expert, and return it."""
    adapters = random_adapters(1, 2, seed)
    save_file(dict(adapters.factors), file)
    return adapters

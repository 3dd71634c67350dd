import cmath
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeflow.kernels.cpu import rotary as cpu_rotary
from moeflow.kernels.rotary import (
    apply_rotary,
    inverse_frequencies,
    rotary_table,
    stretch_llama3,
    stretch_yarn,
    yarn_attention_factor,
)

HEAD_DIMS = [2, 8, 64, 128]


@pytest.fixture(params=["kernels", "numpy"])
def by(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(cpu_rotary, "_AVAILABLE", False)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_pairs_turn_like_complex_numbers(head_dim):
    torch.manual_seed(head_dim)
    positions = [0, 1, 7, 1000]
    x = torch.randn(len(positions), 3, head_dim)
    cos, sin = rotary_table(torch.tensor(positions), inverse_frequencies(head_dim, 100.0), 1.0, torch.float32)
    got = apply_rotary(x, cos, sin)
    half = head_dim // 2
    for token, position in enumerate(positions):
        for head in range(3):
            for pair in range(half):
                angle = position * 100.0 ** (-2 * pair / head_dim)
                value = complex(x[token, head, pair], x[token, head, pair + half]) * cmath.exp(1j * angle)
                assert got[token, head, pair].item() == pytest.approx(value.real, abs=1e-3)
                assert got[token, head, pair + half].item() == pytest.approx(value.imag, abs=1e-3)


@pytest.mark.parametrize("num_tokens", [0, 1, 700])  # the last by several threads
@pytest.mark.parametrize("scale", [1.0, 1.37])
def test_the_table_is_that_of_float64_to_the_last_bit(by, num_tokens, scale):
    positions = torch.arange(num_tokens) * 331  # far beyond where float32 angles are exact
    frequencies = inverse_frequencies(64, 10000.0)
    cos, sin = rotary_table(positions, frequencies, scale, torch.float32)
    angles = [[float(np.float32(p) * f) for f in frequencies] for p in positions.tolist()]
    want_cos = torch.tensor([[[math.cos(angle) * scale for angle in row * 2]] for row in angles]).view(-1, 1, 64)
    half = torch.tensor([[[math.sin(angle) * scale for angle in row]] for row in angles]).view(-1, 1, 32)
    assert torch.equal(cos, want_cos)
    assert torch.equal(sin, torch.cat((-half, half), dim=-1))


def test_it_takes_slices_and_no_tokens_at_all():
    cos, sin = rotary_table(torch.arange(4), inverse_frequencies(8, 10.0), 1.0, torch.float32)
    wide = torch.randn(4, 5 * 8)
    view = wide[:, 8:24].unflatten(-1, (2, 8))
    assert torch.equal(apply_rotary(view, cos, sin), apply_rotary(view.contiguous(), cos, sin))
    assert apply_rotary(view[:0], cos[:0], sin[:0]).shape == (0, 2, 8)


def _transformers(kind: str, head_dim: int, **settings):
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **settings},
    )
    return ROPE_INIT_FUNCTIONS[kind](config)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_llama3_is_as_in_transformers(head_dim, factor):
    want, _ = _transformers(
        "llama3",
        head_dim,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    got = stretch_llama3(
        inverse_frequencies(head_dim, 50000.0),
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    torch.testing.assert_close(torch.from_numpy(got), want)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("fast", "slow", "original"), [(32, 1, 4096), (4, 2, 512), (1, 1, 2048)])
def test_yarn_is_as_in_transformers(head_dim, fast, slow, original):
    want, scale = _transformers(
        "yarn", head_dim, factor=4.0, beta_fast=fast, beta_slow=slow, original_max_position_embeddings=original
    )
    got = stretch_yarn(
        inverse_frequencies(head_dim, 50000.0),
        theta=50000.0,
        factor=4.0,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position=original,
    )
    torch.testing.assert_close(torch.from_numpy(got), want)
    assert yarn_attention_factor(4.0) == pytest.approx(scale) == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_that_does_not_stretch_does_not_scale():
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0

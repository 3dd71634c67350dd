"""The cache of keys and values: planned as it is allocated, exact where that is free, refused if it holds nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.engine_config import BLOCK_SIZE
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.units import GIB, MIB
from moeflow.kv.storage import KVStorage
from moeflow.planner.choices.kv_cache_choice import (
    KV_DTYPES,
    KV_SHARE_BESIDE_SLOTS,
    KVCacheChoice,
    choose_kv_cache,
    kv_share,
    num_kept_blocks,
)
from moeflow.settings.settings import Settings
from tests.shapes import MIXTRAL

TOKEN_BYTES = 2 * 32 * 8 * 128  # of Mixtral's keys and values, at a byte a value


def choose(left_bytes=16 * GIB, share=0.25, torch_dtype=None, max_num_seqs=32, **overrides):
    reasons = []
    cache = choose_kv_cache(
        Settings(**overrides),
        MIXTRAL,
        torch_dtype=torch_dtype,
        left_bytes=left_bytes,
        share=share,
        max_num_seqs=max_num_seqs,
        reasons=reasons,
    )
    return cache, dict(reasons)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_cache_is_planned_as_it_is_allocated(kv_dtype):
    cache, _ = choose(kv_dtype=kv_dtype, kv_cache_bytes=20 * MIB)
    storage = KVStorage(
        layers=range(MIXTRAL.num_layers),
        num_blocks=cache.num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=MIXTRAL.attention.num_kv_heads,
        head_dim=MIXTRAL.attention.head_dim,
        dtype=getattr(torch, kv_dtype),
        device="cpu",
    )
    assert storage.num_bytes == cache.num_bytes <= 20 * MIB


@pytest.mark.parametrize(
    ("torch_dtype", "overrides", "want", "why"),
    [
        (None, {"dtype": "bfloat16"}, "float32", "exact"),
        ("bfloat16", {}, "bfloat16", "what is computed in"),
        (None, {"max_model_len": 512, "kv_cache_bytes": 600 * TOKEN_BYTES * 2}, "bfloat16", "would not fit"),
        (None, {"max_model_len": 100, "kv_cache_bytes": 600 * TOKEN_BYTES * 2}, "float32", "exact"),
        (None, {"kv_cache_bytes": 100 * TOKEN_BYTES}, "float32", "exact"),
    ],
)
def test_keys_and_values_are_kept_exactly_where_that_costs_nothing(torch_dtype, overrides, want, why):
    cache, reasons = choose(torch_dtype=torch_dtype, **overrides)
    assert cache.dtype == want
    assert why in reasons["kv_dtype"]


@given(
    left_bytes=st.integers(16 * TOKEN_BYTES * 4, 64 * GIB),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    kv_dtype=st.sampled_from(["auto", *KV_DTYPES]),
    max_num_seqs=st.integers(1, 256),
)
def test_the_cache_stays_within_its_share_and_holds_the_longest_request(left_bytes, share, kv_dtype, max_num_seqs):
    try:
        cache, reasons = choose(left_bytes, share, max_num_seqs=max_num_seqs, kv_dtype=kv_dtype)
    except CapacityError:
        assert left_bytes * share < BLOCK_SIZE * TOKEN_BYTES * 4
        return
    assert cache.num_bytes <= left_bytes * share
    assert 1 <= cache.max_model_len <= min(cache.num_blocks * BLOCK_SIZE, MIXTRAL.max_position)
    assert cache.num_blocks <= MIXTRAL.max_position // BLOCK_SIZE * max_num_seqs
    is_cut = cache.max_model_len < MIXTRAL.max_position
    assert reasons["max_model_len"].endswith("KV cache" if is_cut else "the model's context")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"kv_cache_bytes": 20 * GIB}, "20.0 GiB is asked for, but .* only 16.0 GiB: ask for less"),
        ({"kv_cache_bytes": 100}, "one request of 16 tokens .* enlarge the KV cache"),
        ({"max_model_len": 512, "kv_cache_bytes": 10_000}, "one request of 512 tokens .* lower max_model_len"),
    ],
)
def test_what_does_not_fit_says_need_have_and_remedy(overrides, words):
    with pytest.raises(CapacityError, match=words):
        choose(**overrides)


@pytest.mark.parametrize("overrides", [{"kv_dtype": "int4"}, {"max_model_len": MIXTRAL.max_position + 1}])
def test_wishes_without_sense_are_refused(overrides):
    with pytest.raises(ConfigError, match=next(iter(overrides))):
        choose(**overrides)


def test_blocks_that_nobody_uses_give_memory_back_to_experts_unless_the_user_said_how_much_there_is():
    share = kv_share(has_slots=True, takes_all=True)
    cache = KVCacheChoice("float32", num_blocks=400, block_bytes=MIB, max_model_len=512)
    assert share == KV_SHARE_BESIDE_SLOTS
    assert num_kept_blocks(Settings(), cache, share) == 100
    assert num_kept_blocks(Settings(kv_cache_bytes=400 * MIB), cache, share) == 400
    assert num_kept_blocks(Settings(), KVCacheChoice("float32", 1, MIB, 16), share) == 1


def test_keys_and_values_take_all_that_a_limit_leaves_beside_weights_that_stay():
    assert kv_share(has_slots=False, takes_all=True) == 1
    assert kv_share(has_slots=False, takes_all=False) == 0.25

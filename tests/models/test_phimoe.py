import pytest
import torch
from transformers import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import sparsemixer as their_sparsemixer

from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.kernels.cpu import row_ops
from moeflow.kernels.routing import Routing
from moeflow.models.families.phimoe import read_config
from tests.models.parity import SHAPE, Parity, make_pair

FACTORS = [1.0, 1.5, 2.5, 4.0]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "biases, long": PhimoeConfig(
        **SHAPE, num_local_experts=4, attention_bias=True, lm_head_bias=True, rope_parameters=LONG
    ),
    # Logits of these tiny models are further apart than the published jitter lets count.
    "nearly all experts count": PhimoeConfig(**SHAPE, num_local_experts=5, router_jitter_noise=0.6, sliding_window=9),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("phimoe"))


class TestPhimoe(Parity):
    pass


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_the_router_is_that_of_transformers(jitter, by_kernels, monkeypatch):
    monkeypatch.setattr(row_ops, "_AVAILABLE", row_ops._AVAILABLE and by_kernels)
    torch.manual_seed(0)
    logits = torch.randn(200, 16) * torch.tensor([0.05, 1.0, 3.0, 20.0]).repeat(50)[:, None]
    weights, ids = their_sparsemixer(logits, jitter_eps=jitter, training=False)
    topk_ids, topk_weights = Routing(2, score="sparsemixer", jitter=jitter)(logits)
    assert torch.equal(topk_ids, ids)
    torch.testing.assert_close(topk_weights, weights)
    assert (weights < 1).any() or jitter == 0.0


def read(**changes):
    raw = CONFIGS["biases, long"].to_dict() | changes
    return read_config(ConfigReader(raw, "config.json"))


def test_factors_are_those_of_the_longest_texts():
    doubled = [2 * it for it in FACTORS]
    rope = {**LONG, "long_factor": doubled, "long_mscale": 1.5}
    long, short = read(rope_parameters=rope), read(rope_parameters=rope, max_position_embeddings=32)
    assert (long.attention.rotary.pair_factors, long.attention.rotary.attention_factor) == (tuple(doubled), 1.5)
    assert (short.attention.rotary.pair_factors, short.attention.rotary.attention_factor) == (tuple(FACTORS), 1.25)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts_per_tok": 3}, "this family's router chooses 2"),
        ({"rope_parameters": {**LONG, "long_factor": FACTORS[:3]}}, "where 4 numbers are expected"),
        ({"rope_parameters": {**LONG, "long_factor": [0.0, *FACTORS[1:]]}}, "where 4 numbers are expected"),
        ({"rope_parameters": {**LONG, "long_mscale": None}}, "no 'long_mscale'"),
        ({"rope_parameters": {**LONG, "rope_theta": 0.5}}, "'rope_theta' is 0.5"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(**changes)

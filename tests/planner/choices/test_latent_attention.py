"""Options that models with latent attention do not support are reported, with the way they run."""

import pytest
from transformers import DeepseekV2Config

from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.models.parity import SHAPE, random_model

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    shape = SHAPE | {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "v_head_dim": 10}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    random_model(DeepseekV2Config(**shape | experts, qk_nope_head_dim=12, qk_rope_head_dim=8)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"device": "emulated:64MiB,1"}, "--device.* do not go with latent attention"),
        ({"num_ranks": 2, "attention_layout": "tensor"}, "--attention-layout tensor.* do not go with latent attention"),
    ],
)
def test_what_cuts_its_layers_is_refused(folder, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        resolve(Settings(model=folder, **settings))


def test_ranks_share_experts_alone(folder):
    parallel = resolve(Settings(model=folder, num_ranks=2)).plan.config.parallel
    assert parallel is not None
    assert parallel.attention_layout == "replicated"

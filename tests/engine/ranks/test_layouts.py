"""However processes share a model, each request gets the tokens and log-probabilities of one process, to the bit.

In passes that mix prompts in chunks with decodes, with prefixes that are found again, and with blocks so few that
requests are preempted.
"""

from __future__ import annotations

import pytest
from transformers import Gemma4TextConfig

from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from tests.engine.ranks.mixed_requests import config_of, resolved, run
from tests.models.parity import random_model
from tests.models.test_gemma4_text import MOE
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("mixtral", "llama", "gemma4_text")}
    write_tiny_mixtral(folders["mixtral"], hidden_size=80, head_dim=16, intermediate_size=72)
    write_tiny_llama(folders["llama"], attention_bias=True)
    longer = MOE | {"vocab_size": 258, "max_position_embeddings": 512}
    config = Gemma4TextConfig(**longer, attention_k_eq_v=True, num_global_key_value_heads=1)
    random_model(config).save_pretrained(folders["gemma4_text"])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def alone(models):
    return {name: run(config_of(model))[0] for name, model in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("mixtral", {"num_ranks": 2, "expert_layout": "sliced"}),
        ("mixtral", {"num_ranks": 3, "expert_layout": "sliced", "attention_layout": "tensor"}),
        ("llama", {"num_ranks": 2, "attention_layout": "tensor"}),
        ("gemma4_text", {"num_ranks": 2, "attention_layout": "tensor"}),
    ],
    ids=str,
)
def test_requests_get_the_tokens_and_log_probabilities_of_one_process(models, alone, name, layouts):
    found, _ = run(config_of(models[name], **layouts))
    assert found == alone[name]
    assert found[1] > 0  # were preempted
    assert found[2] > 0


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("llama", {"num_ranks": 2, "attention_layout": "replicated"}, "no experts.*--attention-layout tensor"),
        ("llama", {"num_ranks": 5, "attention_layout": "tensor"}, "5 ranks .* 4 attention heads"),
        ("mixtral", {"num_ranks": 5, "expert_layout": "expert"}, "only 4 experts.*--expert-layout sliced"),
        ("mixtral", {"num_ranks": 2, "expert_layout": "round"}, "expert_layout 'round' is unknown.*expert, sliced"),
        ("mixtral", {"expert_layout": "sliced"}, "for several ranks"),
        ("mixtral", {"attention_layout": "tensor"}, "for several ranks"),
    ],
)
def test_what_cannot_be_shared_so_is_refused_with_what_to_do(models, name, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolved(models[name], **settings)


def test_as_many_ranks_as_experts_or_heads_can_share_a_model(models):
    assert resolved(models["mixtral"], num_ranks=4).config.parallel.num_ranks == 4
    plan = resolved(models["llama"], num_ranks=4, attention_layout="tensor").plan
    why = "4: each has 1 of the 4 attention heads, and as much of dense layers and the head"
    assert dict(plan.reasons)["ranks"] == why


def test_a_plan_says_what_each_rank_has(models):
    plan = resolved(
        models["mixtral"], num_ranks=2, expert_layout="sliced", attention_layout="tensor", kv_cache_bytes=2**20
    ).plan
    reasons = dict(plan.reasons)
    assert reasons["ranks"] == (
        "2: each has a slice of every expert, 32 or 40 of 72 units; 2 of the 4 attention heads, and as much of dense "
        "layers and the head"
    )
    assert reasons["memory of ranks"] == "412.7 KiB and 1.0 MiB, 497.3 KiB and 1.0 MiB"


def test_fewer_heads_a_rank_leave_room_for_more_tokens(models):
    settings = {"num_ranks": 2, "kv_cache_bytes": 2**20}
    whole = resolved(models["mixtral"], **settings).config.scheduler.num_blocks
    assert resolved(models["mixtral"], attention_layout="tensor", **settings).config.scheduler.num_blocks == 2 * whole

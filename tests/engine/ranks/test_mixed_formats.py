"""A model whose matrices are in several formats, as files called Q4_K_M have them: shared, it gives the same bits."""

from __future__ import annotations

import pytest

from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.checkpoint.block_models import as_q4_k_m, write_block_model
from tests.engine.streamed_runs import run

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PROMPTS = [[5, 9, 70, 31, 7], [40], list(range(20, 60))]


def config_of(model, **settings):
    return resolve(Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20, **settings)).config


@pytest.fixture(scope="module", params=["llama", "qwen3moe"])
def model(request, tmp_path_factory):
    return write_block_model(tmp_path_factory.mktemp(request.param) / "model.gguf", request.param, as_q4_k_m)


@pytest.fixture(scope="module")
def expected(model):
    return run(config_of(model), PROMPTS)


@pytest.mark.parametrize(
    "layouts",
    [
        {"num_ranks": 2, "attention_layout": "tensor", "expert_layout": "sliced"},
        {"num_ranks": 2, "expert_layout": "expert"},
        {"stages": "2"},
        {"stages": "2", "num_ranks": 4, "attention_layout": "tensor", "expert_layout": "sliced"},
    ],
    ids=str,
)
def test_ranks_keep_each_matrix_as_the_file_has_it(model, expected, in_threads, layouts, tmp_path):
    if "expert_layout" in layouts and "llama" in str(model):
        layouts = {name: value for name, value in layouts.items() if name != "expert_layout"}
        if "attention_layout" not in layouts:
            pytest.skip("there are no experts to share")
    config = config_of(model, **layouts)
    assert config.layer_formats
    assert run(config, PROMPTS) == expected
    pack(str(model), None, cache_dir=tmp_path)
    mapped = config_of(model, cache_dir=tmp_path, **layouts)
    assert mapped.packed_file
    assert run(mapped, PROMPTS) == expected


def test_ranks_quantize_with_several_formats(model, in_threads):
    alone = run(config_of(model, quantize="q4_k_m"), PROMPTS)
    shared = config_of(model, quantize="q4_k_m", num_ranks=2, attention_layout="tensor")
    assert shared.layer_formats
    assert run(shared, PROMPTS) == alone


@pytest.mark.slow
def test_a_rank_in_its_own_process_gets_the_formats(tmp_path):
    path = write_block_model(tmp_path / "model.gguf", "qwen3moe", as_q4_k_m)
    shared = config_of(path, num_ranks=2, attention_layout="tensor")
    assert shared.layer_formats
    assert run(shared, PROMPTS) == run(config_of(path), PROMPTS)

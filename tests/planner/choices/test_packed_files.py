"""Which packed weights belong to a model: made where it is missing, found where it is, refused if it is another's."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from functools import partial

import msgspec
import pytest

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.layout import FORMAT_VERSION, encode_header
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.units import MIB
from moeflow.kernels.cpu import extension
from moeflow.llm import LLM
from moeflow.models.layers.allocation.weight_formats import WeightFormats
from moeflow.planner.choices.packed_files import find_packed_experts, pack
from moeflow.planner.costs.process_memory import own_processes, resident_bytes
from moeflow.planner.planning import plan_for_start
from moeflow.planner.resolve import resolve
from moeflow.planner.usage import Usage
from moeflow.settings.settings import Settings
from moeflow.train.importance_learning import ensure_importance
from tests.checkpoint.packed.slabs import flip_bit
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def test_each_format_has_a_file_of_its_own_in_the_cache_folder(model, tmp_path):
    int8 = pack(model, None, cache_dir=tmp_path, quantize="int8")
    own = pack(model, None, cache_dir=tmp_path)
    assert (int8.spec.weight_format, own.spec.weight_format) == ("int8", "float32")
    assert sorted((tmp_path / "experts").iterdir()) == sorted([int8.path, own.path])
    written = int8.path.stat().st_mtime_ns
    assert pack(model, None, cache_dir=tmp_path, quantize="int8") == int8
    assert int8.path.stat().st_mtime_ns == written


def test_the_file_of_another_model_or_format_is_refused(model, tmp_path):
    pack(model, tmp_path / "mine", cache_dir=None, quantize="int8")
    with pytest.raises(ConfigError, match="in int8 instead of int4"):
        pack(model, tmp_path / "mine", cache_dir=None, quantize="int4")


def test_packed_experts_serve_whatever_formats_other_weights_have(model, tmp_path):
    int8 = pack(model, None, cache_dir=tmp_path, quantize="int8")

    def found(matrices, embeddings="bfloat16", path=model):
        with closing(open_checkpoint(path)) as checkpoint:
            return find_packed_experts(checkpoint, WeightFormats(matrices, embeddings), tmp_path)

    assert found("float32") is found("int4") is None
    assert found("int8") == found("int8", "float32") == int8.path
    own = pack(model, None, cache_dir=tmp_path)
    (tmp_path / "experts" / "0.slabs").write_bytes(b"cut")
    assert (found("int8"), found("float32")) == (int8.path, own.path)
    write_tiny_mixtral(tmp_path / "other", vocab_size=200)
    assert found("int8", path=str(tmp_path / "other")) is None


def test_a_dense_model_is_packed_without_slabs(tmp_path):
    write_tiny_llama(tmp_path / "dense")
    index = pack(str(tmp_path / "dense"), None, cache_dir=tmp_path, quantize="int4")
    assert (index.spec.num_slabs, index.spec.weight_format, index.spec.embedding_format) == (0, "int4", "int8")
    assert index.spec.resident_bytes > 0


@pytest.mark.parametrize("part", ["first expert", "last piece"])
def test_packing_again_repairs_a_damaged_file(model, tmp_path, part):
    index = pack(model, tmp_path / "mine", cache_dir=None, quantize="int8")
    content = index.path.read_bytes()
    number = 0 if part == "first expert" else index.spec.num_parts - 1
    flip_bit(index.path, index.spec.offset(number) + 5)
    seen = []
    assert (
        pack(model, index.path, cache_dir=None, quantize="int8", on_bytes=lambda *counts: seen.append(counts)) == index
    )
    assert index.path.read_bytes() == content
    assert seen[-1] == (index.spec.content_bytes, index.spec.content_bytes)


def test_packing_again_replaces_an_older_version_but_no_file_of_others(model, tmp_path):
    index = pack(model, tmp_path / "mine", cache_dir=None)
    older = encode_header(msgspec.structs.replace(index.spec, format_version=FORMAT_VERSION - 1))
    index.path.write_bytes(older)
    assert pack(model, index.path, cache_dir=None) == index
    (tmp_path / "letter").write_text("Dear all")
    with pytest.raises(CheckpointError, match="is no file of packed weights"):
        pack(model, tmp_path / "letter", cache_dir=None)
    assert (tmp_path / "letter").read_text() == "Dear all"


def test_a_mix_is_packed_anew_once_it_is_known_which_inputs_matter(model, tmp_path):
    pack_mix = partial(pack, model, None, cache_dir=tmp_path, quantize="q4_k")
    plain = pack_mix()
    content = plain.path.read_bytes()
    ensure_importance(model, tmp_path, 1)
    weighted = pack_mix()
    assert (plain.spec.is_weighted, weighted.spec.is_weighted) == (False, True)
    assert weighted.path == plain.path
    assert weighted.path.read_bytes() != content
    written = weighted.path.stat().st_mtime_ns
    assert pack_mix() == weighted
    assert weighted.path.stat().st_mtime_ns == written


def test_a_mix_is_the_same_bits_loaded_mapped_and_from_disk(model, tmp_path):
    """Known inputs change them."""
    settings = Settings(
        model=model, cache_dir=tmp_path, quantize="q4_k_m", num_threads=1, kv_cache_bytes=2**20, max_model_len=64
    )
    plain = logprobs(settings)
    ensure_importance(model, tmp_path, 1)
    loaded = logprobs(settings)
    assert loaded != plain
    index = pack(model, None, cache_dir=tmp_path, quantize="q4_k_m")
    assert resolve(settings).config.packed_file == str(index.path)
    assert logprobs(settings) == loaded
    held_bytes = resident_bytes(own_processes(is_served=False))
    limited = dataclasses.replace(settings, kv_cache_bytes=None, memory_bytes=held_bytes + 500 * MIB)
    assert logprobs(limited) == loaded


def logprobs(settings):
    with closing(LLM.from_plan(plan_for_start(settings, Usage()))) as llm:
        (answer,) = llm.generate(["What is a mixture?"], SamplingParams(max_tokens=8, temperature=0.0, logprobs=1))
    return [token.logprob for token in answer.outputs[0].logprobs]

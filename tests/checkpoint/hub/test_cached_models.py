"""The cache is listed under names that lead to its models, and deleting one keeps other models' files."""

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
        with pytest.raises(CheckpointError, match="is not downloaded"):
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


def test_a_named_revision_is_removed_alone(hub, cache):
    repository = hub.add("o/g", {"g-Q4_K_M.gguf": b"4", "g-Q8_0.gguf": b"88"})
    repository.push({"g-Q8_0.gguf": b"dev"}, "dev")
    for name in ("o/g:Q4_K_M", "o/g:Q8_0", "o/g@dev"):
        fetch(name, cache)
    removal = plan_removal(parse_model_name("o/g@main"), cache)
    assert removal.num_bytes == 3
    removal.run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/g@dev:Q8_0"]
    with pytest.raises(CheckpointError, match="is not downloaded"):
        plan_removal(parse_model_name("o/g@main"), cache)


def test_blobs_of_a_pull_outlast_the_last_model(hub, cache):
    hub.add("o/g", {"g-Q8_0.gguf": b"88"})
    fetch("o/g:Q8_0", cache)
    blob = cache / "models--o--g" / "blobs" / ("d" * 64)
    blob.write_bytes(b"12345")
    removal = plan_removal(ModelName("o/g", file="Q8_0"), cache)
    assert removal.num_bytes == 2
    removal.run()
    assert blob.read_bytes() == b"12345"
    assert plan_removal(ModelName("o/g"), cache).num_bytes == 5


@pytest.mark.parametrize("others", [(), ("notes.txt",)])
def test_a_repository_that_is_a_link_is_deleted_behind_it(hub, cache, tmp_path, others):
    hub.add("o/g", {"g-Q8_0.gguf": b"88"})
    fetch("o/g", cache)
    folder, disk = cache / "models--o--g", tmp_path / "disk"
    folder.rename(disk)
    folder.symlink_to(disk)
    for name in others:
        (disk / name).write_text("mine")
    plan_removal(ModelName("o/g"), cache).run()
    assert list(cache.iterdir()) == []
    assert disk.exists() == bool(others)
    assert {it.name for it in disk.glob("*")} == set(others)


def test_stray_files_beside_snapshots_are_passed_over(hub, cache):
    hub.add("o/g", {"g-Q4_K_M.gguf": b"4", "g-Q8_0.gguf": b"88"})
    fetch("o/g:Q4_K_M", cache)
    fetch("o/g:Q8_0", cache)
    (cache / "models--o--g" / "snapshots" / ".DS_Store").write_bytes(b"finder")
    plan_removal(ModelName("o/g", file="Q4_K_M"), cache).run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/g:Q8_0"]
    plan_removal(ModelName("o/g", file="Q8_0"), cache).run()
    assert list(cache.iterdir()) == []


def test_files_in_place_of_links_are_counted(hub, cache):
    hub.add("o/g", {"g-Q8_0.gguf": b"88"})
    file = fetch("o/g", cache)
    file.resolve().rename(cache / "bytes")
    file.unlink()
    (cache / "bytes").rename(file)
    assert plan_removal(ModelName("o/g"), cache).num_bytes == 2
    removal = plan_removal(ModelName("o/g", file="Q8_0"), cache)
    assert removal.num_bytes == 2
    removal.run()
    assert list(cache.iterdir()) == []


def parts(tag: str, *data: bytes, folder: str = "") -> dict[str, bytes]:
    return {f"{folder}g-{tag}-{number:05}-of-{len(data):05}.gguf": it for number, it in enumerate(data, 1)}


def test_a_model_in_parts_is_one(hub, cache):
    files = parts("Q4_K_M", b"1", b"22") | parts("Q6_K", b"333", b"4444", b"5", folder="Q6_K/") | {"g-Q8_0.gguf": b"88"}
    hub.add("o/g", files)
    for tag, first in (
        ("Q4_K_M", "g-Q4_K_M-00001-of-00002"),
        ("q6_k", "Q6_K/g-Q6_K-00001-of-00003"),
        ("Q8_0", "g-Q8_0"),
    ):
        path = fetch(f"o/g:{tag}", cache)
        assert path.relative_to(path.parents[first.count("/")]).as_posix() == f"{first}.gguf"
        assert pulled_name(path) == called(path) == f"o/g:{tag.upper()}"
    models = cached_models(cache)
    assert {str(it.name): it.num_bytes for it in models} == {"o/g:Q4_K_M": 3, "o/g:Q6_K": 8, "o/g:Q8_0": 2}
    for model in models:
        assert find_model(model.name, cache) == model.path
    for name, num_bytes in (("o/g:q6_k", 8), ("o/g:g-Q4_K_M-00001-of-00002.gguf", 3)):
        removal = plan_removal(parse_model_name(name), cache)
        assert removal.num_bytes == num_bytes
        removal.run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/g:Q8_0"]
    assert [it.read_bytes() for it in (cache / "models--o--g" / "blobs").iterdir()] == [b"88"]


def test_parts_that_another_tool_has_fetched_in_part(hub, cache):
    hub.add("o/g", parts("Q4_K_M", b"1", b"22", b"333") | {"g-Q8_0.gguf": b"88"})
    path = fetch("o/g:Q4_K_M", cache)
    fetch("o/g:Q8_0", cache)
    second = path.with_name("g-Q4_K_M-00002-of-00003.gguf")
    second.unlink()
    assert find_model(ModelName("o/g", file="Q4_K_M"), cache) is None
    assert {str(it.name): it.num_bytes for it in cached_models(cache)} == {"o/g:Q4_K_M": 4, "o/g:Q8_0": 2}
    hub.requests.clear()
    assert fetch("o/g:Q4_K_M", cache) == path
    assert (second.read_bytes(), hub.sent()) == (b"22", []), "whose bytes were here"
    second.unlink()
    removal = plan_removal(ModelName("o/g", file="Q4_K_M"), cache)
    assert removal.num_bytes == 4
    removal.run()
    assert [str(it.name) for it in cached_models(cache)] == ["o/g:Q8_0"]
    assert unfinished_bytes(cache) == {"o/g": 2}


def test_models_of_one_tag_have_names_of_their_own(hub, cache):
    files = {f"{folder}/m-Q8_0.gguf": folder.encode() for folder in ("a", "b")}
    hub.add("o/g", files | parts("Q4_K_M", b"1", b"22") | {"g-Q4_K_M.gguf": b"333"})
    for path in (*files, "g-Q4_K_M-00001-of-00002.gguf", "g-Q4_K_M.gguf"):
        fetch(f"o/g:{path}", cache)
    models = cached_models(cache)
    assert {str(it.name): it.num_bytes for it in models} == {
        "o/g:a/m-Q8_0.gguf": 1,
        "o/g:b/m-Q8_0.gguf": 1,
        "o/g:g-Q4_K_M-00001-of-00002.gguf": 3,
        "o/g:g-Q4_K_M.gguf": 3,
    }
    for model in models:
        assert find_model(model.name, cache) == model.path


def test_whole_blobs_without_links_are_of_a_pull_that_broke_off(hub, cache):
    hub.add("o/g", {"g-Q8_0.gguf": b"88"})
    fetch("o/g", cache)
    assert unfinished_bytes(cache) == {}
    (cache / "models--o--g" / "blobs" / ("d" * 64)).write_bytes(b"12345")
    assert unfinished_bytes(cache) == {"o/g": 5}


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
    with pytest.raises(CheckpointError, match=r"o/m was not found: .* `moeflow pull o/m`"):
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

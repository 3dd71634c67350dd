"""The model of a machine that joins: one that is there is used, one with a name is brought."""

from __future__ import annotations

import dataclasses
import json

import pytest
from huggingface_hub import constants

from moeflow.core.engine_config import ExpertSlotsConfig, PromptCacheConfig
from moeflow.core.errors import CapacityError, ConfigError, HubError
from moeflow.engine.ranks import own_model
from moeflow.engine.ranks.own_model import bring_own_model, find_own_model, in_tenths
from moeflow.planner.resolve import resolve
from moeflow.processes.nodes.join_settings import JoinSettings, own_config
from moeflow.settings.settings import Settings
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.tiny_mixtral import write_tiny_mixtral

COMMIT = "0123456789" * 4
BUILT_IN = "/nowhere/builtin-12345678/Small-8x1M"


def ignored(*_: object) -> None:
    pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        yield hub


def test_a_model_of_a_hub_is_pulled_at_the_commit_of_the_server(hub, tmp_path):
    repository = hub.add("o/m", {"config.json": b"{}", "model.safetensors": b"old"})
    old = repository.commit
    repository.push({"config.json": b"{}", "model.safetensors": b"new"})
    server_path = f"/nowhere/models--o--m/snapshots/{old}"
    steps = []
    assert find_own_model(server_path, None) is None
    path = bring_own_model(server_path, None, lambda *step: steps.append(step))
    assert path == f"{tmp_path}/hub/models--o--m/snapshots/{old}"
    assert (tmp_path / "hub" / "models--o--m" / "snapshots" / old / "model.safetensors").read_bytes() == b"old"
    assert find_own_model(server_path, None) == path
    assert steps[-1] == (f"pulling o/m@{old}", 5, 5)


def test_of_several_gguf_files_the_server_s_is_pulled(hub, tmp_path):
    commit = hub.add("o/g", {"m-Q8_0.gguf": b"eight", "m-Q4_K_M.gguf": b"four"}).commit
    path = bring_own_model(f"/nowhere/models--o--g/snapshots/{commit}/m-Q8_0.gguf", None, ignored)
    assert path == f"{tmp_path}/hub/models--o--g/snapshots/{commit}/m-Q8_0.gguf"


def test_a_pull_can_be_stopped(hub):
    commit = hub.add("o/m", {"config.json": b"{}", "model.safetensors": b"weights"}).commit

    def stop(*_: object) -> None:
        raise ConfigError("stopped")

    with pytest.raises(ConfigError, match="stopped"):
        bring_own_model(f"/nowhere/models--o--m/snapshots/{commit}", None, stop)


def test_what_a_hub_does_not_have_is_an_error(hub):
    with pytest.raises(HubError, match="o/none"):
        bring_own_model(f"/nowhere/models--o--none/snapshots/{COMMIT}", None, ignored)


def test_a_shared_path_is_used_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    shared = tmp_path / "shared" / "models--o--m" / "snapshots" / COMMIT
    shared.mkdir(parents=True)
    assert find_own_model(str(shared), None) == str(shared)
    assert find_own_model("/models/without/a/name", None) == "/models/without/a/name"  # the caller's error names it
    with pytest.raises(ConfigError, match="copy it to this machine, or share its folder"):
        bring_own_model("/models/without/a/name", None, ignored)


def test_the_built_in_model_is_made_in_the_cache_folder(monkeypatch, tmp_path):
    made = tmp_path / "builtin-12345678" / "Small-8x1M"
    reports = [{"done": 1, "total": 2}, {"error": "its source is not installed"}]

    def run_apart(module: str, order: bytes):
        assert (module, order) == ("moeflow.train.making_process", str(tmp_path).encode())
        yield from (json.dumps(report).encode() for report in reports)

    monkeypatch.setattr(own_model, "run_apart", run_apart)
    assert find_own_model(BUILT_IN, tmp_path) is None
    with pytest.raises(ConfigError, match="its source is not installed"):
        bring_own_model(BUILT_IN, tmp_path, ignored)
    del reports[1]
    with pytest.raises(CapacityError, match="could not be made"):
        bring_own_model(BUILT_IN, tmp_path, ignored)
    made.mkdir(parents=True)
    steps = []
    assert bring_own_model(BUILT_IN, tmp_path, lambda *step: steps.append(step)) == str(made)
    assert steps == [("making the built-in model", 1, 2)]
    assert find_own_model(BUILT_IN, tmp_path) == str(made)


def test_the_process_that_makes_it_exists():
    making_process = pytest.importorskip(own_model._MAKER)
    assert making_process.builtin_folder(making_process.Path("/c")).parent.name.startswith(own_model._BUILTIN)
    assert making_process._Report(error="x").error == "x"


def test_progress_is_reported_in_tenths():
    news: list[str] = []
    report = in_tenths(news.append)
    for done in range(0, 41):
        report("pulling m", done, 40)
    report("packing m", 0, 0)
    assert news == [*(f"pulling m: {percent}%" for percent in range(0, 101, 10)), "packing m: 0%"]


def test_folders_of_the_server_become_those_of_this_machine(tmp_path):
    write_tiny_mixtral(tmp_path)
    config = resolve(Settings(model=str(tmp_path), cache_dir=tmp_path, num_threads=3)).config
    theirs = dataclasses.replace(
        config,
        model_path="/nowhere/m",
        packed_file="/nowhere/m.slabs",
        experts=ExpertSlotsConfig(packed_weights_file="/nowhere/m.slabs", num_slots=4, slab_bytes=1),
        prompt_cache=PromptCacheConfig(folder="/nowhere/prompts", max_bytes=1),
    )
    settings = JoinSettings(host="a", port=1, token=b"", num_threads=1, cache_dir=tmp_path / "cache")
    own = own_config(theirs, str(tmp_path), settings)
    assert (own.model_path, own.packed_file, own.num_threads) == (str(tmp_path), "", 1)
    assert own.experts.packed_weights_file.startswith(f"{tmp_path}/cache/experts/")
    assert own.prompt_cache.folder == f"{tmp_path}/cache/prompts"
    kept = dataclasses.replace(theirs, prompt_cache=PromptCacheConfig(folder=str(tmp_path), max_bytes=1))
    assert own_config(kept, str(tmp_path), settings).prompt_cache == kept.prompt_cache

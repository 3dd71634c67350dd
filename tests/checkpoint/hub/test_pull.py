"""A pull brings the very bytes, whatever the network does, into a cache that the hub's own library finds whole."""

import hashlib
import random
import shutil
from pathlib import Path
from threading import Event

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir, snapshot_download

from moeflow.checkpoint.hub import blob_download, hub_client
from moeflow.checkpoint.hub.blob_download import StoppedError, fetch_blob
from moeflow.checkpoint.hub.hub_client import RemoteFile, list_repository, open_at
from moeflow.checkpoint.hub.local_models import find_model
from moeflow.checkpoint.hub.model_name import parse_model_name
from moeflow.checkpoint.hub.pull import pull
from moeflow.core.errors import CapacityError, CheckpointError, HubConnectionError, HubError
from tests.checkpoint.hub.hub_server import OTHER_TOKEN, TOKEN, checksum

REPO = "o/model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(blob_download, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(blob_download, "_MAX_WAIT_S", 0.002)


def model_files(seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    index = b'{"weight_map": {"a": "%s", "b": "%s"}}' % tuple(name.encode() for name in SHARDS)
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": rng.randbytes(50_000),
        "model.safetensors.index.json": index,
        SHARDS[0]: rng.randbytes(700_001),
        SHARDS[1]: rng.randbytes(300_000),
        "1_Pooling/config.json": b"{}",
        "empty.txt": b"",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"print('never fetched')",
    }


def pulled(text: str, cache: Path) -> Path:
    name = parse_model_name(text)
    assert name is not None
    return pull(name, cache, lambda *_: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def wanted(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.endswith((".bin", ".py"))}


def test_the_bytes_are_the_hubs_and_its_library_finds_them(hub, cache):
    files = model_files()
    commit = hub.add(REPO, files).commit
    steps: list[tuple[int, int]] = []
    folder = pull(parse_model_name(REPO), cache, lambda *step: steps.append(step))
    assert contents(folder) == wanted(files)
    total = sum(len(data) for data in {bytes(data) for data in wanted(files).values()})
    assert steps[-1] == (total, total)
    assert folder == cache / "models--o--model" / "snapshots" / commit
    assert hf_hub_download(REPO, "config.json", local_files_only=True, cache_dir=cache) == str(folder / "config.json")
    before = len(hub.sent())
    again = snapshot_download(REPO, cache_dir=cache, allow_patterns=list(wanted(files)))
    assert (again, len(hub.sent())) == (str(folder), before), "the library fetched bytes that were there"
    found = scan_cache_dir(cache)
    assert not found.warnings
    assert {file.file_path for it in found.repos for rev in it.revisions for file in rev.files} >= set(
        folder.glob("*.*s*")
    )


def test_what_the_library_has_fetched_is_found_and_not_fetched_again(hub, cache):
    hub.add(REPO, model_files())
    theirs = snapshot_download(REPO, cache_dir=cache, allow_patterns=list(wanted(model_files())))
    assert str(find_model(parse_model_name(REPO), cache)) == theirs
    before = len(hub.sent())
    assert str(pulled(REPO, cache)) == theirs
    assert len(hub.sent()) == before


@pytest.mark.parametrize("seed", range(3))
def test_twenty_cuts_at_random_change_no_byte(hub, cache, seed):
    files = model_files(seed)
    hub.add(REPO, files)
    hub.cuts_left, hub.chunk_bytes, hub.random = 20, 5_000, random.Random(seed)
    assert contents(pulled(REPO, cache)) == wanted(files)
    assert hub.num_cuts == 20
    starts = [int(it.range[6:].partition("-")[0]) for it in hub.sent() if it.range]
    assert len(set(starts)) > 5, "each cut went on from where it was"


def test_a_server_that_knows_no_ranges_sends_all_again(hub, cache):
    files = model_files()
    hub.add(REPO, files)
    hub.knows_ranges, hub.cuts_left = False, 6
    assert contents(pulled(REPO, cache)) == wanted(files)


def test_the_token_goes_to_the_hub_and_not_to_the_content_network(hub, cache, monkeypatch):
    hub.add(REPO, model_files(), gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pulled(REPO, cache)
    assert {it.token for it in hub.sent(on_cdn=False)} == {TOKEN}
    assert {it.token for it in hub.sent()} == {None}


def test_wrong_bytes_are_fetched_once_more_and_then_refused(hub, cache):
    files = model_files()
    hub.add(REPO, files)
    hub.damages = 1
    assert contents(pulled(REPO, cache)) == wanted(files)
    shutil.rmtree(cache)
    hub.damages = 100
    with pytest.raises(HubError, match="twice with another checksum"):
        pulled(REPO, cache)
    assert find_model(parse_model_name(REPO), cache) is None


def test_a_partial_file_that_is_wrong_is_noticed(hub, cache):
    files = model_files()
    hub.add(REPO, files)
    blobs = cache / "models--o--model" / "blobs"
    blobs.mkdir(parents=True)
    for name, kept in {SHARDS[0]: b"x" * 1000, SHARDS[1]: b"y" * 400_000, "config.json": b"z"}.items():
        (blobs / f"{checksum(name, files[name])}.incomplete").write_bytes(kept)
    assert contents(pulled(REPO, cache)) == wanted(files)


def test_refusals_for_now_are_tried_again(hub, cache):
    hub.add(REPO, model_files())
    hub.statuses = [403, 429, 500, 503, 504]
    assert pulled(REPO, cache).is_dir()


def test_a_hub_that_only_refuses_ends_it_and_keeps_what_there_is(hub, cache):
    files = model_files()
    hub.add(REPO, files)
    hub.statuses = [503] * 1000
    with pytest.raises(HubConnectionError, match="answers 503"):
        pulled(REPO, cache)
    assert find_model(parse_model_name(REPO), cache) is None
    hub.statuses = []
    assert contents(pulled(REPO, cache)) == wanted(files)


def test_a_new_commit_brings_only_what_changed(hub, cache):
    files = model_files()
    repository = hub.add(REPO, files)
    old = pulled(REPO, cache)
    changed = files | {"config.json": b'{"model_type": "mixtral"}'}
    repository.push(changed)
    before = len(hub.sent())
    new = pulled(REPO, cache)
    assert (contents(new), contents(old)) == (wanted(changed), wanted(files))
    assert len(hub.sent()) == before
    assert find_model(parse_model_name(REPO), cache) == new
    assert pulled(f"{REPO}@{old.name}", cache) == old


def test_branches_and_gguf_files_are_models_of_their_own(hub, cache):
    repository = hub.add(REPO, {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"})
    assert pulled(f"{REPO}:Q8_0", cache).read_bytes() == b"GGUF8"
    assert find_model(parse_model_name(f"{REPO}:Q4_K_M"), cache) is None
    repository.push({"m-Q4_K_M.gguf": b"GGUF4 anew"})
    assert pulled(REPO, cache).read_bytes() == b"GGUF4 anew"
    found = find_model(parse_model_name(f"{REPO}:Q8_0"), cache)
    assert found is not None
    assert found.read_bytes() == b"GGUF8", "of an older commit"
    repository.push({"m-Q4_K_M.gguf": b"GGUF try"}, "refs/pr/1")
    assert find_model(parse_model_name(f"{REPO}@refs/pr/1"), cache) is None
    assert pulled(f"{REPO}@refs/pr/1", cache).read_bytes() == b"GGUF try"


def test_errors_say_what_to_do(hub, cache, monkeypatch):
    hub.add("o/gated", model_files(), gated=True)
    hub.add("o/private", model_files(), private=True)
    hub.add("o/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.add("o/bare", {"model.safetensors": b"1"})
    lacking = model_files()
    del lacking[SHARDS[1]]
    hub.add("o/lacking", lacking)
    for name, kind, said in [
        ("o/gated", HubError, "log in and accept them; then set HF_TOKEN"),
        ("o/private", HubError, "no model o/private, or it is private and no token is set"),
        ("o/nothing", HubError, "Check the spelling"),
        ("o/gated@nowhere", HubError, "no branch, tag or commit 'nowhere'"),
        ("o/pickles", CheckpointError, "pickles only"),
        ("o/lacking", CheckpointError, f"lacks {SHARDS[1]}"),
        ("o/bare", CheckpointError, "no config.json"),
    ]:
        with pytest.raises(kind, match=said):
            pulled(name, cache)
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    for name, said in [("o/gated", "has no access yet"), ("o/private", "the token that is set may not read it")]:
        with pytest.raises(HubError, match=said):
            pulled(name, cache)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="refuses the token"):
        pulled("o/gated", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        pulled("o/gated", cache)


def test_weights_for_mlx_are_not_fetched(hub, cache):
    config = b'{"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}}'
    hub.add(REPO, model_files() | {"config.json": config})
    with pytest.raises(CheckpointError, match=r"quantized for MLX \(4 bits, groups of 64\)"):
        pulled(REPO, cache)
    assert not hub.sent()


def test_a_hub_that_is_out_of_reach_is_one_error(hub, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubConnectionError, match=r"cannot be reached .* HF_ENDPOINT"):
        pulled(REPO, cache)


def test_a_disk_without_room_is_said_before(hub, cache, monkeypatch):
    hub.add(REPO, model_files())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1_000_000))
    with pytest.raises(CapacityError, match=r"needs 1.0 MiB of disk .* 976.6 KiB are free"):
        pulled(REPO, cache)
    assert [it for it in hub.sent() if SHARDS[0] in it.path] == []


@pytest.mark.parametrize("path", ["../out.json", "/etc/x.json", "a/../../x.json"])
def test_a_list_that_leads_out_of_the_cache_is_refused(hub, cache, path):
    hub.add(REPO, model_files() | {path: b"{}"})
    with pytest.raises(HubError, match="are expected"):
        pulled(REPO, cache)


def test_a_size_below_nothing_is_refused():
    entry = {"rfilename": "m.gguf", "size": -1, "blobId": "a" * 40}
    with pytest.raises(HubError, match=r"-1, .* a size and a checksum are expected"):
        hub_client._remote_file(entry, parse_model_name(REPO))


@pytest.mark.parametrize("branches", [("main", "main/x"), ("main/x", "main")])
def test_a_branch_that_meets_anothers_name_is_explained(hub, cache, branches):
    repository = hub.add(REPO, {"m-Q8_0.gguf": b"1"})
    repository.push({"m-Q8_0.gguf": b"2"}, "main/x")
    pulled(f"{REPO}@{branches[0]}", cache)
    with pytest.raises(CheckpointError, match="cannot be named"):
        pulled(f"{REPO}@{branches[1]}", cache)
    folder = cache / "models--o--model" / "refs"
    assert [it.name for it in folder.rglob("*") if it.is_file()] == [branches[0].rpartition("/")[2]]


def test_a_download_that_is_stopped_keeps_what_has_arrived(hub, cache):
    data = random.Random(1).randbytes(500_000)
    hub.add(REPO, {"m-Q8_0.gguf": data})
    repository = list_repository(parse_model_name(REPO))
    file = RemoteFile("m-Q8_0.gguf", len(data), hashlib.sha256(data).hexdigest())
    stop, arrived = Event(), 0

    def count(num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes
        if arrived > 100_000:
            stop.set()

    with pytest.raises(StoppedError):
        fetch_blob(file, lambda start: open_at(repository, file.path, start), cache, count, stop)
    kept = (cache / f"{file.checksum}.incomplete").read_bytes()
    assert 100_000 < len(kept) < len(data)
    assert data.startswith(kept)
    fetch_blob(file, lambda start: open_at(repository, file.path, start), cache, lambda _: None, Event())
    assert hub.sent()[-1].range == f"bytes={len(kept)}-"
    assert [it.name for it in cache.iterdir()] == [file.checksum]

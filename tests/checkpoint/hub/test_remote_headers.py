"""Headers alone say of a model on a hub what its files would, and little is fetched for them."""

from contextlib import contextmanager

import pytest

from moeflow.checkpoint.hub import hub_client
from moeflow.checkpoint.hub import remote_headers as module
from moeflow.checkpoint.hub.hub_client import Pieces, list_repository, open_at
from moeflow.checkpoint.hub.model_name import parse_model_name
from moeflow.checkpoint.hub.remote_headers import remote_headers
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import HubError
from moeflow.core.units import MIB
from moeflow.models.registry import read_model_config
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.checkpoint.tiny_models import random_weights, write_gguf
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture
def folder(tmp_path):
    model = write_tiny_mixtral(tmp_path / "Tiny", hidden_size=128, intermediate_size=256)
    model.save_pretrained(tmp_path / "Tiny", max_shard_size="1MB")
    (tmp_path / "Tiny" / "model.safetensors").unlink(missing_ok=True)
    return tmp_path / "Tiny"


def facts(path) -> tuple:
    checkpoint = open_checkpoint(path)
    config = resolve(Settings(model=str(path))).config
    checkpoint.close()
    tensors = {name: (info.shape, info.num_bytes, info.stored_as) for name, info in checkpoint.tensors.items()}
    return read_model_config(checkpoint), tensors, config.model_name, config.scheduler, config.weight_format


@pytest.mark.parametrize("first_bytes", [64, 1 << 18])
def test_a_folder_of_shards(hub, folder, monkeypatch, first_bytes):
    monkeypatch.setattr(module, "_FIRST_BYTES", first_bytes)
    assert len(list(folder.glob("*.safetensors"))) > 1
    hub.add_folder("o/Tiny", folder)
    hub.cuts_left = 3
    with remote_headers(parse_model_name("o/Tiny")) as path:
        assert facts(path) == facts(folder)
        held = [file for file in path.parent.rglob("*") if file.is_file()]
        if first_bytes == 64:  # else all that these have
            weights = [file for file in held if file.suffix == ".safetensors"]
            assert (
                sum(file.stat().st_blocks for file in weights) * 512 < 50_000 < sum(it.stat().st_size for it in weights)
            )
    assert not path.exists()
    assert all(it.range is not None for it in hub.sent())


def test_a_gguf_file_whose_header_takes_several_pieces(hub, tmp_path, monkeypatch):
    file = tmp_path / "m-Q8_0.gguf"
    write_gguf(file, "mixtral", random_weights("mixtral"))
    monkeypatch.setattr(module, "MIB", 100)
    hub.add("o/m", {file.name: file.read_bytes()})
    with remote_headers(parse_model_name("o/m:Q8_0")) as path:
        assert facts(path) == facts(file)
    ends = [int(it.range.rpartition("-")[2]) for it in hub.sent()]
    assert len(ends) > 1
    assert max(ends) < file.stat().st_size - 1


def test_a_gguf_model_in_parts(hub, tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", "mixtral", random_weights("mixtral"), split_max_tensors=4, small_first_shard=True)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 4
    monkeypatch.setattr(module, "MIB", 400)
    monkeypatch.setattr(module, "_FIRST_BYTES", 300)
    hub.add("o/m", {f"Q8_0/{part.name}": part.read_bytes() for part in parts})
    with remote_headers(parse_model_name("o/m:Q8_0")) as path:
        assert facts(path) == facts(parts[0])
        assert path.name == parts[0].name
    assert len({it.path for it in hub.sent()}) == len(parts)
    asked = [[int(place) for place in it.range.removeprefix("bytes=").split("-")] for it in hub.sent()]
    num_bytes = sum(stop + 1 - start for start, stop in asked)
    assert num_bytes < 6000 < sum(part.stat().st_size for part in parts) / 10


def test_what_has_no_header_is_an_error(hub, monkeypatch):
    monkeypatch.setattr(module, "MIB", 100)
    monkeypatch.setattr(module, "_MAX_HEADER_BYTES", 1000)
    header = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (1).to_bytes(8, "little")
    name = (60_000).to_bytes(8, "little")
    hub.add("o/m", {"m.gguf": header + name + bytes(100_000)})
    with pytest.raises(HubError, match="has no GGUF header in its first"), remote_headers(parse_model_name("o/m")):
        pass
    hub.knows_ranges = False
    with pytest.raises(HubError, match="sends no parts of files"), remote_headers(parse_model_name("o/m")):
        pass


def test_a_server_without_ranges_is_left_once_the_beginning_is_here(hub, monkeypatch):
    hub.add("o/m", {"m.gguf": bytes(range(256)) * (1 << 14)})
    hub.knows_ranges = False
    repository = list_repository(parse_model_name("o/m"))
    received = []

    @contextmanager
    def counted(*args):
        with open_at(*args) as pieces:
            yield Pieces(pieces.start, (received.append(len(chunk)) or chunk for chunk in pieces.chunks))

    monkeypatch.setattr(hub_client, "open_at", counted)
    assert hub_client.read_range(repository, "m.gguf", 0, 1000) == (bytes(range(256)) * 4)[:1000]
    assert sum(received) < MIB < repository.files["m.gguf"].num_bytes

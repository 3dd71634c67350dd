"""States in files: all of a state or none, whatever was cut short before."""

import numpy as np
import pytest

from moeflow.core.recurrent_config import RecurrentConfig, ShortConvConfig
from moeflow.engine.prompt_cache.state_files import StateFiles
from moeflow.kv.disk import extent_folder
from moeflow.kv.disk.extent_folder import ExtentFolder
from moeflow.kv.state_slots import StateCheckpoint
from moeflow.kv.state_storage import StateStorage

CONFIG = RecurrentConfig(layers=(0, 2, 3), mixer=ShortConvConfig(num_channels=8, kernel_size=3))
KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(extent_folder, "REFRESH_S", 0.0)


def make(path) -> tuple[StateFiles, StateStorage]:
    states = StateStorage(CONFIG, 3, None)
    for number in range(states.num_layers):
        for slot in range(3):
            content = np.arange(16, dtype=np.float32) + 100 * number + 1000 * slot
            states.copy_in(number, slot, memoryview(content).cast("B"))
    settings = {"model": "m", "identity": b"i" * 32, "block_bytes": states.layer_bytes, "max_bytes": 100_000}
    return StateFiles(ExtentFolder(path, **settings), states), states


def content_of(states: StateStorage, slot: int) -> bytes:
    pieces = [memoryview(bytearray(states.layer_bytes)) for _ in range(states.num_layers)]
    for number, piece in enumerate(pieces):
        states.copy_out(number, slot, piece)
    return b"".join(pieces)


def buffer() -> memoryview:
    return memoryview(bytearray(128))


def read(files: StateFiles, key: bytes, slot: int) -> bool:
    return files.read(key, slot, buffer(), lambda: None)


def test_what_was_written_is_read_by_another_process(tmp_path):
    files, states = make(tmp_path)
    assert states.layer_bytes * states.num_layers == files.state_bytes == 3 * 64
    assert files.write(KEYS[1], StateCheckpoint(2), buffer(), set()) > 3 * 64
    assert files.write(KEYS[1], StateCheckpoint(2), buffer(), set()) == 0
    others, theirs = make(tmp_path)
    assert others.length(KEYS) == 2
    assert others.names_of(KEYS) == {file.name for file in tmp_path.glob("*.moekv")}
    assert read(others, KEYS[1], 0)
    assert content_of(theirs, 0) == content_of(states, 2)
    assert not read(others, KEYS[0], 0)


class GivenUp:
    """A `StateCheckpoint` that is given up once some of its layers are copied."""

    def __init__(self, slot: int, num_kept: int) -> None:
        self.slot, self.left = slot, num_kept

    @property
    def is_kept(self) -> bool:
        self.left -= 1
        return self.left >= 0

    @is_kept.setter
    def is_kept(self, _: bool) -> None:
        pass


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_a_part_of_a_state_is_none(tmp_path, num_kept):
    files, _ = make(tmp_path)
    files.write(KEYS[0], GivenUp(1, num_kept), buffer(), set())
    others, theirs = make(tmp_path)
    assert others.length(KEYS) == 0
    assert not read(others, KEYS[0], 0)
    assert others.write(KEYS[0], StateCheckpoint(1), buffer(), set()) > 0
    assert others.length(KEYS) == 1
    assert read(others, KEYS[0], 0)
    assert content_of(theirs, 0) == content_of(theirs, 1)


@pytest.mark.parametrize("cuts", [False, True])
def test_a_damaged_state_is_none_and_its_file_is_deleted(tmp_path, cuts):
    files, _ = make(tmp_path)
    files.write(KEYS[0], StateCheckpoint(1), buffer(), set())
    (file,) = tmp_path.glob("*.moekv")
    content = bytearray(file.read_bytes())
    content[70] ^= 1  # of the second layer
    file.write_bytes(content[:-1] if cuts else content)
    others, _ = make(tmp_path)
    assert not read(others, KEYS[0], 0)
    assert others.length(KEYS) == 0
    assert file.exists() == cuts  # useless, it is evicted first


def test_without_room_nothing_is_written(tmp_path):
    files, _ = make(tmp_path)
    files.folder.max_bytes = 100
    assert files.write(KEYS[0], StateCheckpoint(1), buffer(), set()) == 0
    assert not list(tmp_path.iterdir()) or files.length(KEYS) == 0

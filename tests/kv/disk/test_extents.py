"""Files of blocks: a read returns the written block or nothing, whatever happened to the file."""

from __future__ import annotations

import fcntl
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.kv.disk import extent_folder, folder_lock
from moeflow.kv.disk.block_keys import KEY_BYTES, block_keys, next_key
from moeflow.kv.disk.extent import described_bytes, read_extent
from moeflow.kv.disk.extent_folder import ExtentFolder
from moeflow.kv.disk.folder_lock import LOCK_NAME
from moeflow.kv.disk.folder_usage import clear_folder, folder_bytes, folder_usage

SIZE = 4096  # bytes of a block
ONE = b"1" * 32  # identities
OTHER = b"2" * 32


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(extent_folder, "REFRESH_S", 0.0)


def content(key: bytes) -> bytes:
    return (key * SIZE)[:SIZE]


def folder(path, *, identity=ONE, max_bytes=10**6, model="m") -> ExtentFolder:
    return ExtentFolder(path, model=model, identity=identity, block_bytes=SIZE, max_bytes=max_bytes)


def write(to: ExtentFolder, keys, *, keep=(), gone=None, at_once=3) -> int:
    def gather(number, into):
        into[:] = content(keys[number])
        return number != gone

    return to.write(keys, gather, memoryview(bytearray(at_once * SIZE)), to.names_of(keep))


def read(of: ExtentFolder, keys, at_once=2) -> list[bytes]:
    found = []

    def take(number, block):
        assert number == len(found)
        found.append(bytes(block))

    assert of.read(keys, take, memoryview(bytearray(at_once * SIZE))) == len(found)
    return found


def prefix(*tokens: int, identity=ONE) -> list[bytes]:
    return block_keys(identity, [token for token in tokens for _ in range(2)], 2)


def test_keys_tell_models_tokens_and_places_apart():
    keys = block_keys(ONE, [1, 2, 3, 4, 1, 2, 9], 2)
    assert len(set(keys)) == 3
    assert all(len(key) == KEY_BYTES for key in keys)
    assert keys[1] == next_key(next_key(ONE, [1, 2]), (3, 4))
    assert block_keys(ONE, [1, 2, 3, 4], 2) == keys[:2]
    assert set(block_keys(OTHER, [1, 2, 3, 4, 1, 2], 2)).isdisjoint(keys)
    assert block_keys(ONE, [1, 3], 2) != keys[:1]


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_blocks_come_back_also_from_several_files_and_in_another_process(tmp_path, at_once):
    keys = prefix(*range(7))
    writer = folder(tmp_path / "a" / "b")
    write(writer, keys[:4], at_once=at_once)
    write(writer, keys[4:], at_once=at_once)
    reader = folder(tmp_path / "a" / "b")
    assert reader.count(keys) == 7
    assert read(reader, keys, at_once) == [content(key) for key in keys]
    assert read(reader, keys[2:6], at_once) == [content(key) for key in keys[2:6]]
    assert read(reader, [*keys[:2], b"?" * KEY_BYTES], at_once) == [content(key) for key in keys[:2]]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "a" / "b").iterdir())


def test_what_others_write_and_delete_is_noticed(tmp_path):
    one, same, other = folder(tmp_path), folder(tmp_path), folder(tmp_path, identity=OTHER)
    keys = prefix(1, 2, 3)
    write(one, keys)
    for each, expected in ((same, 3), (other, 0)):
        each.refresh()
        assert each.count(keys) == expected
    assert same.missing([*keys, b"x"]) == [range(3, 4)]
    clear_folder(tmp_path)
    assert read(same, keys) == []
    assert same.count(keys) == 0
    one.refresh()
    assert one.missing(keys) == [range(3)]


def test_what_another_deletes_is_noticed_at_once_where_that_may_not_be_late(tmp_path, monkeypatch):
    monkeypatch.setattr(extent_folder, "REFRESH_S", 1000.0)
    limit = file_bytes(3) + file_bytes(2)
    one, other = folder(tmp_path, max_bytes=limit), folder(tmp_path, identity=OTHER, max_bytes=limit)
    keys = prefix(1, 2, 3)
    write(one, keys)
    write(other, prefix(*range(5), identity=OTHER)[:3])
    one.refresh()
    assert one.missing(keys) == []
    one.refresh(may_be_late=False)
    assert one.missing(keys) == [range(3)]


def test_blocks_that_are_gone_end_what_is_written(tmp_path):
    keys = prefix(*range(5))
    one = folder(tmp_path)
    assert write(one, keys, gone=3) > 0
    assert (one.count(keys), read(one, keys)) == (3, [content(key) for key in keys[:3]])
    assert write(one, prefix(9), gone=0) == 0
    assert one.count(prefix(9)) == 0


@settings(max_examples=200)
@given(data=st.data())
def test_no_damage_gives_wrong_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("extents")
    keys = prefix(*range(4))
    write(folder(path), keys)
    (file,) = path.glob("*.moekv")
    whole = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        damaged = bytearray(whole)
        start = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(st.binary(min_size=1, max_size=60) | st.just(bytes(60)))
        damaged[start : start + len(new)] = new
        del damaged[len(whole) :]
    file.write_bytes(damaged)
    reader = folder(path)
    found = read(reader, keys)
    assert found == [content(key) for key in keys[: len(found)]]
    first = next((i for i, (a, b) in enumerate(zip(whole, damaged, strict=False)) if a != b), len(damaged))
    assert (first < len(whole)) == (len(found) < 4)
    is_in_blocks = len(damaged) == len(whole) and damaged[4 * SIZE :] == whole[4 * SIZE :]
    assert len(found) == (first // SIZE if is_in_blocks and first < len(whole) else 4 if damaged == whole else 0)


def test_a_damaged_file_is_deleted_and_written_anew(tmp_path, caplog):
    keys = prefix(1, 2, 3)
    one = folder(tmp_path)
    write(one, keys)
    (file,) = tmp_path.glob("*.moekv")
    torn = bytearray(file.read_bytes())
    torn[SIZE] ^= 1
    file.write_bytes(torn)
    assert read(one, keys) == [content(keys[0])]
    assert not file.exists()
    assert "is damaged" in caplog.text
    write(one, keys)
    assert read(one, keys) == [content(key) for key in keys]


def file_bytes(num_blocks: int) -> int:
    return num_blocks * SIZE + described_bytes(num_blocks)


def test_what_was_used_longest_ago_makes_room(tmp_path):
    one = folder(tmp_path, max_bytes=3 * file_bytes(2))
    other = folder(tmp_path, identity=OTHER, max_bytes=one.max_bytes)
    first, second, of_other = prefix(1, 1), prefix(2, 2), prefix(3, 3, identity=OTHER)
    for number, (writer, keys) in enumerate(((one, first), (other, of_other), (one, second))):
        write(writer, keys)
        for file in tmp_path.glob("*.moekv"):
            if file.stat().st_mtime > 10**6:
                os.utime(file, (number, number))
    one.touch(first)
    write(one, prefix(4, 4))
    assert folder_bytes(tmp_path) == one.num_bytes <= one.max_bytes
    other.refresh()
    assert [other.count(of_other), one.count(first), one.count(second), one.count(prefix(4, 4))] == [0, 2, 2, 2]
    write(one, prefix(5, 5))
    assert [one.count(first), one.count(second)] == [2, 0]


def test_the_end_of_a_prefix_goes_first_and_a_prefix_is_not_deleted_for_its_own_end(tmp_path):
    one = folder(tmp_path, max_bytes=2 * file_bytes(2))
    keys = prefix(*range(8))
    for start in (0, 2):
        assert write(one, keys[start : start + 2], keep=keys)
        one.touch(keys)
    assert write(one, keys[4:6], keep=keys) == 0
    assert one.count(keys) == 4
    assert write(one, prefix(77, 78)) > 0
    assert one.count(keys) == 2


def test_a_file_larger_than_the_budget_is_not_written(tmp_path):
    one = folder(tmp_path, max_bytes=file_bytes(2))
    write(one, prefix(1))
    assert write(one, prefix(*range(3))) == 0
    assert one.count(prefix(1)) == 1


def test_writers_take_turns_and_clean_up_after_those_that_were_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_S", 0.05)
    one = folder(tmp_path)
    (tmp_path / ".half.moekv.tmp").write_bytes(b"x")
    with (tmp_path / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert write(one, prefix(1)) == 0
    assert write(one, prefix(1)) > 0
    assert not list(tmp_path.glob(".*.tmp"))


def test_writers_and_readers_at_the_same_time_never_see_wrong_bytes_nor_exceed_the_budget(tmp_path):
    """Folder objects share nothing but the files, as those of processes."""
    budget = 4 * file_bytes(3)
    texts = [prefix(*range(start, start + 6)) for start in range(0, 60, 6)]
    until_s = time.monotonic() + 1.0

    def work(seed: int) -> int:
        rng, one, num_read = random.Random(seed), folder(tmp_path, max_bytes=budget), 0
        while time.monotonic() < until_s:
            keys = rng.choice(texts)
            one.refresh()
            found = read(one, keys)
            assert found == [content(key) for key in keys[: len(found)]]
            num_read += len(found)
            for run in one.missing(keys):
                write(one, keys[run.start : min(run.start + 3, run.stop)], keep=keys)
            one.touch(keys)
            assert folder_bytes(tmp_path) <= budget
        return num_read

    with ThreadPoolExecutor(4) as threads:
        assert all(list(threads.map(work, range(4))))
    assert {file.suffix for file in tmp_path.iterdir()} == {".moekv", ""}


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, failing):
    one = folder(tmp_path)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    target = (extent_folder.ExtentWriter, "append") if failing == "write" else (extent_folder.Path, "rename")
    monkeypatch.setattr(*target, refuse)
    with pytest.raises(OSError, match="No space"):
        write(one, prefix(1))
    assert {file.name for file in tmp_path.iterdir()} == {LOCK_NAME}
    monkeypatch.undo()
    assert write(one, prefix(1)) > 0


def test_a_folder_can_be_looked_into_and_cleared(tmp_path):
    assert (folder_usage(tmp_path / "none"), folder_bytes(tmp_path / "none"), clear_folder(tmp_path / "none")) == (
        [],
        0,
        0,
    )
    before = time.time()
    write(folder(tmp_path), prefix(*range(5)))
    write(folder(tmp_path), prefix(7))
    write(folder(tmp_path, identity=OTHER, model="n"), prefix(1, identity=OTHER))
    (tmp_path / "x.moekv").write_bytes(b"no extent")
    (tmp_path / ".half.moekv.tmp").write_bytes(b"part of a conversation")
    of_others = {"kivy.kv", ".note.tmp"}
    for name in of_others:
        (tmp_path / name).write_bytes(b"not ours")
    found = {one.model: one for one in folder_usage(tmp_path)}
    assert {name: one.num_blocks for name, one in found.items()} == {"m": 6, "n": 1, "damaged": 0}
    assert found["m"].last_used_s >= before - 1
    assert sum(one.num_bytes for one in found.values()) == folder_bytes(tmp_path)
    assert clear_folder(tmp_path) > 7 * SIZE
    assert folder_usage(tmp_path) == []
    assert {file.name for file in tmp_path.iterdir()} == {LOCK_NAME, *of_others}


def test_a_file_that_cannot_be_read_is_left_out(tmp_path):
    write(folder(tmp_path), prefix(1))
    (file,) = tmp_path.glob("*.moekv")
    file.with_name(file.name.replace("-", "-0", 1)).mkdir()  # which no one reads as a file
    assert folder(tmp_path).count(prefix(1)) == 1


def test_a_file_of_another_version_is_not_used(tmp_path, monkeypatch):
    one = folder(tmp_path)
    write(one, prefix(1))
    (file,) = tmp_path.glob("*.moekv")
    assert read_extent(file) is not None
    monkeypatch.setattr("moeflow.kv.disk.extent.FORMAT_VERSION", 2)
    assert read_extent(file) is None

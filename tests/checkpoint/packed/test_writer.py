"""Interruptions of every kind while packed weights grows: the result is all right, or absent and quick to complete."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import moeflow.checkpoint.packed.writer as slab_writer
from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.checkpoint.packed.writer import build_packed_weights_file, partial_file
from moeflow.core.errors import CapacityError, ConfigError
from tests.checkpoint.packed.slabs import flip_bit, make_spec, slab, write_packed_weights_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_some(target, spec, count, raising=None):
    """Write `count` of the missing slabs; return how many were missing."""
    with build_packed_weights_file(target, spec) as writer:
        missing = writer.missing()
        for layer, expert in missing[:count]:
            writer.write(layer, expert, memoryview(slab(spec, layer, expert)))
        if raising:
            raise raising
    return len(missing)


def check_content(file, spec):
    index = read_slab_index(file)
    content = file.read_bytes()
    for number in range(spec.num_slabs):
        start = index.spec.offset(number)
        assert content[start : start + spec.part_bytes(number)] == slab(spec, *divmod(number, spec.num_experts))


@pytest.mark.parametrize("raising", [ValueError(), KeyboardInterrupt(), SystemExit(), OSError(errno.EIO, "broken")])
def test_an_interrupted_writing_goes_on(tmp_path, raising):
    spec, target = make_spec(), tmp_path / "model.slabs"
    with pytest.raises(type(raising)):
        write_some(target, spec, 5, raising)
    assert names(tmp_path) == [".model.slabs.building"]
    assert write_some(target, spec, 99) == 12 - 5
    assert names(tmp_path) == ["model.slabs"]
    check_content(target, spec)


def test_an_interruption_while_checking_what_is_there_loses_nothing(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    spec, target = make_spec(), tmp_path / "model.slabs"
    with pytest.raises(KeyboardInterrupt):
        write_some(target, spec, 5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), build_packed_weights_file(target, spec, interrupt):
        pass
    assert write_some(target, spec, 99) == 12 - 5


def test_nothing_is_left_if_nothing_was_written(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_some(tmp_path / "model.slabs", make_spec(), 0, KeyboardInterrupt())
    assert names(tmp_path) == []


def test_slabs_left_behind_are_read_before_they_are_trusted(tmp_path):
    spec, target = make_spec(), tmp_path / "model.slabs"
    with pytest.raises(KeyboardInterrupt):
        write_some(target, spec, 5, KeyboardInterrupt())
    flip_bit(partial_file(target), spec.offset(2) + 17)
    with build_packed_weights_file(target, spec) as writer:
        assert writer.missing()[0] == (0, 2)
        assert len(writer.missing()) == 12 - 4
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(slab(spec, layer, expert)))
    check_content(target, spec)


@pytest.mark.parametrize("change", [{"identity": "another model"}, {"weight_format": "int4"}, {"slab_bytes": 5000}])
def test_what_another_build_left_behind_is_not_used(tmp_path, change):
    target = tmp_path / "model.slabs"
    with pytest.raises(KeyboardInterrupt):
        write_some(target, make_spec(**change), 5, KeyboardInterrupt())
    assert write_some(target, make_spec(), 99) == 12
    check_content(target, make_spec())


def test_a_damaged_leftover_is_started_anew(tmp_path):
    target = tmp_path / "model.slabs"
    partial_file(target).write_bytes(b"nonsense" * PAGE_BYTES)
    assert write_some(target, make_spec(), 99) == 12
    check_content(target, make_spec())


def test_a_finished_file_is_replaced_at_the_end_only(tmp_path):
    old, new, target = make_spec(), make_spec(identity="another model"), tmp_path / "model.slabs"
    write_packed_weights_file(target, old)
    with pytest.raises(KeyboardInterrupt):
        write_some(target, new, 3, KeyboardInterrupt())
    assert read_slab_index(target).spec == old
    write_some(target, new, 99)
    assert read_slab_index(target).spec == new


def test_a_forgotten_slab_keeps_the_file_from_appearing(tmp_path):
    with pytest.raises(ValueError, match="11 parts were never written, layer 0, expert 1 first"):
        write_some(tmp_path / "model.slabs", make_spec(), 1)
    assert names(tmp_path) == [".model.slabs.building"]


def test_a_slab_of_another_layers_size_is_refused(tmp_path):
    with build_packed_weights_file(tmp_path / "model.slabs", make_spec()) as writer:
        with pytest.raises(ValueError, match="4096 bytes here, not 5000"):
            writer.write(0, 0, memoryview(bytes(5000)))
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(slab(make_spec(), layer, expert)))


def test_a_slab_of_another_size_is_refused(tmp_path):
    with build_packed_weights_file(tmp_path / "model.slabs", make_spec(num_layers=1, num_experts=1)) as writer:
        with pytest.raises(ValueError, match="5000 bytes here, not 4999"):
            writer.write(0, 0, memoryview(bytes(4999)))
        writer.write(0, 0, memoryview(bytes(5000)))


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    target = tmp_path / "model.slabs"
    with build_packed_weights_file(target, make_spec()) as writer:
        with pytest.raises(ConfigError, match="another process"), build_packed_weights_file(target, make_spec()):
            pass
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(slab(make_spec(), layer, expert)))
    check_content(target, make_spec())


def test_progress_counts_what_was_there_already(tmp_path):
    spec, target, seen = make_spec(), tmp_path / "model.slabs", []
    with pytest.raises(KeyboardInterrupt):
        write_some(target, spec, 5, KeyboardInterrupt())
    with build_packed_weights_file(target, spec, lambda done, total: seen.append((done, total))) as writer:
        for layer, expert in writer.missing():
            writer.write(layer, expert, memoryview(slab(spec, layer, expert)))
    sizes = [4096] * 4 + [5000] * 4 + [3001] * 4
    assert seen == [(sum(sizes[:count]), sum(sizes)) for count in range(5, 13)]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path):
    spec = make_spec(slab_bytes=10**15)
    with pytest.raises(CapacityError, match=r"model\.slabs: need .* GiB more, have .* Free some space"):
        write_some(tmp_path / "model.slabs", spec, 1)
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_keeps_what_is_written(tmp_path, monkeypatch):
    spec, target = make_spec(), tmp_path / "model.slabs"
    full_from = spec.offset(4)

    def write_or_refuse(descriptor, content, start):
        if start >= full_from:
            raise OSError(errno.ENOSPC, "no space")
        write_all(descriptor, content, start)

    write_all = slab_writer.write_all
    monkeypatch.setattr(slab_writer, "write_all", write_or_refuse)
    with pytest.raises(CapacityError, match=r"not enough disk space for .*model\.slabs: need .* have .* kept"):
        write_some(target, spec, 99)
    monkeypatch.undo()
    assert write_some(target, spec, 99) == 12 - 4
    check_content(target, spec)


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Choose a place that you may write to"):
        write_some(tmp_path / "file" / "model.slabs", make_spec(), 1)


@pytest.mark.slow
def test_a_killed_writer_leaves_what_the_next_one_can_use(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from tests.checkpoint.packed.slabs import make_spec, slab
        from moeflow.checkpoint.packed.writer import build_packed_weights_file
        spec = make_spec()
        with build_packed_weights_file(Path(sys.argv[1]), spec) as writer:
            for layer, expert in writer.missing()[:5]:
                writer.write(layer, expert, memoryview(slab(spec, layer, expert)))
            writer.settle()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    spec, target = make_spec(), tmp_path / "model.slabs"
    command = [sys.executable, "-c", textwrap.dedent(code), str(target)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert write_some(target, spec, 99) == 12 - 5
    check_content(target, spec)

"""Models with recurrent layers over one folder: prefixes are found up to a state, with the bits of computed ones."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from contextlib import closing

import pytest
from hypothesis import settings

from moeflow.core.engine_config import StateSlotsConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import ConfigError
from moeflow.engine.engine import Engine
from moeflow.engine.prompt_cache import prompt_cache
from moeflow.kernels.cpu import extension
from moeflow.kv.disk import extent_folder
from moeflow.kv.disk.folder_usage import folder_usage
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.prompt_cache.test_prompt_cache import GREEDY, SAMPLED, TEXT, Restarts, ask
from tests.engine.test_model_runner import run, tokens
from tests.tiny_granite_hybrid import write_tiny_granite_hybrid
from tests.tiny_lfm2 import write_tiny_lfm2

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="only kernels give the same bits every time")
EVERY = 32


@pytest.fixture(
    scope="module", params=[write_tiny_lfm2, pytest.param(write_tiny_granite_hybrid, marks=pytest.mark.thorough)]
)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    request.param(folder)
    return folder


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(extent_folder, "REFRESH_S", 0.0)
    monkeypatch.setattr(prompt_cache, "QUICK_LOOK_S", 1.0)  # however busy the machine is


def load(model, cache=None, *, num_blocks=60, num_slots=8, **changes) -> Engine:
    wanted = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 48, "dtype": "float32", **changes}
    config = resolve(Settings(model=str(model), prompt_cache=cache, **wanted)).config
    states = StateSlotsConfig(num_slots=num_slots, checkpoint_every=EVERY)
    scheduler = dataclasses.replace(config.scheduler, num_blocks=num_blocks, max_model_len=200, states=states)
    return Engine.load(dataclasses.replace(config, scheduler=scheduler))


def kept(engine: Engine) -> dict[tuple[int, ...], tuple[bytes, bytes]]:
    """Return the bytes of all blocks and states of the prefix tree, by the tokens up to their end."""
    kv, blocks, found = engine._runner.kv, engine._scheduler.blocks, {}
    assert kv.states is not None
    for node in blocks.tree.nodes():
        content = memoryview(bytearray(kv.content_bytes))
        kv.copy_out(node.block_id, content)
        state = b""
        for _, checkpoint in blocks.states.of_path([node]):
            for number in range(kv.states.num_layers):
                piece = memoryview(bytearray(kv.states.layer_bytes))
                kv.states.copy_out(number, checkpoint.slot, piece)
                state += bytes(piece)
        spelled, up = (), node
        while up.parent is not None:
            spelled, up = up.tokens + spelled, up.parent
        found[spelled] = bytes(content), state
    return found


def wait_for_writes(engine: Engine) -> None:
    for job in engine._prompt_cache._to_write:
        job.result(20)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_next_turn_after_a_restart_goes_on_from_the_last_state_with_the_same_bits(model, tmp_path, sampling):
    with closing(load(model)) as plain:
        answer, _ = ask(plain, TEXT[:95], sampling)
        turn = [*TEXT[:95], *answer, *TEXT[100:120]]
        expected, _ = ask(plain, turn, sampling)
        computed = kept(plain)
    with closing(load(model, tmp_path)) as first:
        assert ask(first, TEXT[:95], sampling) == (answer, 0)
    with closing(load(model, tmp_path)) as second:
        assert ask(second, turn, sampling) == (expected, 96)  # 106 tokens were computed
        wait_for_writes(second)
        read, stats = kept(second), second.stats()
    assert sum(bool(state) for _, state in read.values()) >= 1
    names = {one.model.removeprefix(second.model.name) for one in folder_usage(tmp_path)}
    assert names == {"", ", recurrent states"}
    for spelled, (content, state) in read.items():
        assert content == computed[spelled][0]
        assert state in (b"", computed[spelled][1])
    state_bytes = len(next(state for _, state in read.values() if state))
    assert (stats.prompt_cache_hit_tokens_total, stats.prefix_hit_tokens_total) == (96, 96)
    assert stats.prompt_cache_read_bytes_total == 6 * len(next(iter(read.values()))[0]) + state_bytes
    assert stats.prompt_cache_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.moekv"))


def test_packed_weights_in_numpys_arrays_have_states_on_disk_too(model, tmp_path):
    pack(str(model), tmp_path / "w.slabs", cache_dir=None)
    changes = {"packed_weights_file": tmp_path / "w.slabs", "dtype": "auto"}
    with closing(load(model, tmp_path / "c", **changes)) as first:
        expected = ask(first, TEXT)[0]
    with closing(load(model, tmp_path / "c", **changes)) as second:
        assert ask(second, TEXT) == (expected, 128)


def test_a_branch_goes_on_from_the_last_state_that_it_shares(model, tmp_path):
    branch = [*TEXT[:80], *TEXT[:40]]
    with closing(load(model)) as plain:
        expected, _ = ask(plain, branch)
    with closing(load(model, tmp_path)) as first:
        ask(first, TEXT)
    with closing(load(model, tmp_path)) as second:
        assert ask(second, branch) == (expected, 64)


def test_a_state_that_gave_way_is_read_again_without_the_blocks(model, tmp_path):
    """The tree still has the prefix' blocks."""
    with closing(load(model, tmp_path, num_slots=3)) as engine:
        expected, _ = ask(engine, TEXT)
        wait_for_writes(engine)
        ask(engine, TEXT[::-1])
        assert engine._scheduler.blocks.states.num_checkpoints <= 2
        before = engine.stats()
        assert ask(engine, TEXT) == (expected, 128)
        after = engine.stats()
    assert after.prompt_cache_hit_tokens_total == before.prompt_cache_hit_tokens_total
    assert after.prompt_cache_read_bytes_total > before.prompt_cache_read_bytes_total


@pytest.mark.parametrize("num_slots", [2, 8])
def test_requests_that_begin_alike_wait_for_one_read(model, tmp_path, num_slots):
    submissions = [Submission(str(i), [*TEXT[:100], i + 5], GREEDY, seed=7) for i in range(3)]
    with closing(load(model)) as plain:
        expected = [tokens(run(plain, [submission])[submission.request_id]) for submission in submissions]
    with closing(load(model, tmp_path)) as first:
        ask(first, TEXT)
    with closing(load(model, tmp_path, num_slots=num_slots)) as engine:
        found = run(engine, submissions)
        assert [tokens(found[it.request_id]) for it in submissions] == expected
        assert engine.stats().prompt_cache_hit_tokens_total == 96


@pytest.mark.parametrize("kind", ["states", "blocks"])
@pytest.mark.parametrize("cuts", [False, True])
def test_what_is_damaged_is_computed(model, tmp_path, kind, cuts):
    with closing(load(model, tmp_path)) as first:
        expected, _ = ask(first, TEXT)
        wait_for_writes(first)
        folder = first._prompt_cache._folder if kind == "blocks" else first._prompt_cache._states.folder
    names = [name for name, extent in folder._known.items() if extent is not None]  # all, now that it is closed
    assert names
    for name in names:
        content = bytearray((tmp_path / name).read_bytes())
        content[3] ^= 0x10
        (tmp_path / name).write_bytes(content[: len(content) - 5] if cuts else content)
    found = []
    for _ in range(5):  # each finds a damaged file, which is written anew
        with closing(load(model, tmp_path)) as engine:
            answer, num_cached = ask(engine, TEXT)
            assert answer == expected
            found.append(num_cached)
    assert found[0] < 128
    assert found[-1] == 128


def test_states_that_are_given_to_others_before_they_are_written_are_not_written(model, tmp_path, monkeypatch):
    """The thread that writes comes late: by then slots hold states of another text."""
    goes_on = threading.Event()
    with closing(load(model, tmp_path, num_slots=3)) as engine:
        cache = engine._prompt_cache
        write = cache._states.folder.write
        monkeypatch.setattr(cache._states.folder, "write", lambda *a: goes_on.wait(20) and write(*a))
        expected = ask(engine, TEXT)[0]
        ask(engine, TEXT[::-1])
        goes_on.set()
    with closing(load(model, num_slots=20)) as plain:
        computed = kept(plain) if ask(plain, TEXT) and ask(plain, TEXT[::-1]) else {}
    with closing(load(model, tmp_path)) as engine:
        assert ask(engine, TEXT)[0] == expected
        ask(engine, TEXT[::-1])
        for spelled, (content, state) in kept(engine).items():
            assert content == computed[spelled][0]
            assert state in (b"", computed[spelled][1])


def test_states_count_in_the_budget(model, tmp_path):
    with closing(load(model, tmp_path)) as first:
        ask(first, TEXT)
        wait_for_writes(first)
        one = first.stats().prompt_cache_bytes
    for file in tmp_path.glob("*.moekv"):
        file.unlink()
    limit = one * 3 // 2
    for start in range(3):
        with closing(load(model, tmp_path, prompt_cache_bytes=limit)) as engine:
            text = TEXT[start:] + TEXT[:start]
            expected, _ = ask(engine, text)
            assert engine.stats().prompt_cache_bytes <= limit
        assert sum(file.stat().st_size for file in tmp_path.glob("*.moekv")) <= limit
        with closing(load(model, tmp_path, prompt_cache_bytes=limit)) as engine:
            assert ask(engine, text) == (expected, 128)  # the newest prefix is whole


def test_blocks_that_have_just_made_room_are_written_anew(model, tmp_path, monkeypatch):
    with closing(load(model, tmp_path)) as first:
        expected, _ = ask(first, TEXT)
        wait_for_writes(first)
        monkeypatch.setattr(extent_folder, "REFRESH_S", 1000.0)
        for name in first._prompt_cache._folder._known:
            (tmp_path / name).unlink()
        ask(first, TEXT, name="again")
    with closing(load(model, tmp_path)) as second:
        assert ask(second, TEXT) == (expected, 128)


def test_where_not_all_fits_a_prefix_keeps_its_last_state(model, tmp_path):
    with closing(load(model, tmp_path)) as first:
        ask(first, TEXT)
        wait_for_writes(first)
        limit = first.stats().prompt_cache_bytes - 1
    for file in tmp_path.glob("*.moekv"):
        file.unlink()
    with closing(load(model, tmp_path, prompt_cache_bytes=limit)) as engine:
        expected, _ = ask(engine, TEXT)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.moekv")) <= limit
    with closing(load(model, tmp_path, prompt_cache_bytes=limit)) as engine:
        assert ask(engine, TEXT) == (expected, 128)


def test_a_model_in_which_nothing_attends_is_refused(tmp_path):
    write_tiny_granite_hybrid(tmp_path, layer_types=["linear_attention"] * 3)
    with pytest.raises(ConfigError, match="no layer of a granitemoehybrid model has keys"):
        load(tmp_path, tmp_path / "cache")


class RecurrentRestarts(Restarts):
    """The same with states."""

    def begin(self, num_blocks):
        self.engine = load(self.model, self.cache, num_blocks=num_blocks, num_slots=5, prompt_cache_bytes=40_000)
        self.asked = {}


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_tiny_lfm2, write_tiny_granite_hybrid])
def test_restarts_damage_and_eviction_never_show_in_answers(write, tmp_path):
    model = tmp_path / "model"
    write(model)
    machine = RecurrentRestarts
    machine.model, machine.root, machine.numbers, machine.expected = model, tmp_path, itertools.count(), {}
    with closing(load(model)) as machine.plain:
        case = machine.TestCase
        case.settings = settings(max_examples=8, stateful_step_count=25)
        case("runTest").runTest()

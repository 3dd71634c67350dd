"""Engines that come and go over one folder: tokens, and keys and values to the bit, are those computed anew."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import threading
from contextlib import closing, suppress

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.prompt_cache import prompt_cache
from moeflow.engine.prompt_cache.identity import kv_identity
from moeflow.kernels.cpu import extension
from moeflow.kv.disk import extent_folder
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.test_model_runner import run, tokens
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason="only kernels give the same bits every time")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.9)
TEXT = random.Random(5).choices(range(2, 258), k=150)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(extent_folder, "REFRESH_S", 0.0)
    monkeypatch.setattr(prompt_cache, "QUICK_LOOK_S", 1.0)  # however busy the machine is


def load(model, cache=None, *, num_blocks=60, **changes) -> Engine:
    wanted = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 48, "dtype": "float32", **changes}
    config = resolve(Settings(model=str(model), prompt_cache=cache, **wanted)).config
    scheduler = dataclasses.replace(config.scheduler, num_blocks=num_blocks, max_model_len=200)
    return Engine.load(dataclasses.replace(config, scheduler=scheduler))


def ask(engine: Engine, prompt: list[int], sampling=GREEDY, name="r"):
    """Return the tokens of an answer, and how many of the prompt were not computed."""
    outputs = run(engine, [Submission(name, prompt, sampling, seed=7)])[name]
    assert outputs[-1].error is None
    return tokens(outputs), outputs[-1].num_cached_tokens


def kept_blocks(engine: Engine) -> dict[tuple[int, ...], bytes]:
    """Return the bytes of all blocks of the prefix tree, by the tokens up to their end."""
    kv, found = engine._runner.kv, {}
    for node in engine._scheduler.blocks.tree.nodes():
        content = memoryview(bytearray(kv.content_bytes))
        kv.copy_out(node.block_id, content)
        spelled, up = (), node
        while up.parent is not None:
            spelled, up = up.tokens + spelled, up.parent
        found[spelled] = bytes(content)
    return found


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_next_turn_after_a_restart_is_read_and_has_the_same_bits(model, tmp_path, sampling, kv_dtype):
    with closing(load(model, kv_dtype=kv_dtype)) as plain:
        answer, _ = ask(plain, TEXT[:100], sampling)
        turn = [*TEXT[:100], *answer, *TEXT[100:120]]
        expected, _ = ask(plain, turn, sampling)
        computed = kept_blocks(plain)
    with closing(load(model, tmp_path, kv_dtype=kv_dtype)) as first:
        assert ask(first, TEXT[:100], sampling) == (answer, 0)
    with closing(load(model, tmp_path, kv_dtype=kv_dtype)) as second:
        assert ask(second, turn, sampling) == (expected, 96)  # what ended the first answer is in no full block
        read = kept_blocks(second)
        stats = second.stats()
    assert len(read) >= 8
    assert read.items() <= computed.items()
    assert (stats.prompt_cache_hit_tokens_total, stats.prefix_hit_tokens_total) == (96, 96)
    assert stats.prompt_cache_read_bytes_total == 96 // 16 * len(next(iter(read.values())))
    assert 0 < stats.prompt_cache_bytes <= stats.prompt_cache_limit_bytes
    assert stats.is_prompt_cache_writing


def test_packed_weights_in_numpys_arrays_have_a_prompt_cache_too(model, tmp_path):
    from moeflow.planner.choices.packed_files import pack

    pack(str(model), tmp_path / "w.slabs", cache_dir=None)
    changes = {"packed_weights_file": tmp_path / "w.slabs", "dtype": "auto"}
    with closing(load(model, tmp_path / "c", **changes)) as first:
        expected = ask(first, TEXT)[0]
    with closing(load(model, tmp_path / "c", **changes)) as second:
        assert ask(second, TEXT) == (expected, 144)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": "bfloat16"},
        {"quantize": "int8", "dtype": "auto"},
        {"dtype": "bfloat16"},
        {"cpu_isa": "generic"},
        "config",
        "weights",
    ],
    ids=str,
)
def test_another_model_format_or_instruction_set_finds_nothing(model, tmp_path, changes):
    own = tmp_path / "model"
    shutil.copytree(model, own)
    with closing(load(own, tmp_path / "c")) as first:
        ask(first, TEXT)
    if changes == "config":
        file = own / "config.json"
        file.write_text(file.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04'))
    elif changes == "weights":
        os.utime(next(own.glob("*.safetensors")), (1, 1))
    other = {} if isinstance(changes, str) else changes
    try:
        with closing(load(own, tmp_path / "c", **other)) as second:
            assert ask(second, TEXT)[1] == 0
            assert second.stats().prompt_cache_read_bytes_total == 0
    finally:
        extension.use_isa("")


def test_the_same_engine_has_the_same_identity_and_changed_code_another(model, tmp_path, monkeypatch):
    with closing(load(model)) as engine:
        one = kv_identity(engine.config)
        assert kv_identity(engine.config) == one
        more_threads = dataclasses.replace(engine.config, num_threads=7, model_name="else", kv_cache_bytes=5)
        assert kv_identity(more_threads) == one
        wide = dataclasses.replace(engine.config, is_wide=True)
        assert kv_identity(wide) != one
        importance = tmp_path / "importance"
        mixed = dataclasses.replace(engine.config, mix="q4_k", importance_file=str(importance))
        importance.write_text("one")
        rounded = kv_identity(mixed)
        importance.write_text("other")
        assert len({one, rounded, kv_identity(mixed)}) == 3
        copy = tmp_path / "models"
        shutil.copytree(os.path.dirname(prompt_cache.__file__), copy)
        monkeypatch.setattr("moeflow.engine.prompt_cache.identity.models.__path__", [str(copy)])
        changed = kv_identity(engine.config)
        (copy / "prompt_cache.py").write_text("changed")
        assert len({one, changed, kv_identity(engine.config)}) == 3


def test_short_prompts_are_not_worth_a_file_until_they_grow(model, tmp_path):
    with closing(load(model, tmp_path)) as engine:
        ask(engine, TEXT[:40])
    assert not list(tmp_path.glob("*.moekv"))
    with closing(load(model, tmp_path)) as engine:
        ask(engine, TEXT[:80])
    assert len(list(tmp_path.glob("*.moekv"))) == 1


def test_batch_jobs_read_but_do_not_write(model, tmp_path):
    batch = msgspec.structs.replace(Submission("r", TEXT, GREEDY, seed=7), is_batch=True)
    with closing(load(model, tmp_path)) as engine:
        expected = tokens(run(engine, [batch])["r"])
    assert not list(tmp_path.glob("*.moekv"))
    with closing(load(model, tmp_path)) as engine:
        ask(engine, TEXT)
    with closing(load(model, tmp_path)) as engine:
        outputs = run(engine, [batch])["r"]
        assert (tokens(outputs), outputs[-1].num_cached_tokens) == (expected, 144)


def test_several_engines_share_a_folder(model, tmp_path):
    with closing(load(model, tmp_path)) as one, closing(load(model, tmp_path)) as other:
        expected = ask(one, TEXT)[0]
        one._prompt_cache._to_write[-1].result(10)
        assert ask(other, TEXT) == (expected, 144)


def test_a_request_that_waits_for_its_prefix_holds_up_nobody(model, tmp_path, monkeypatch):
    with closing(load(model, tmp_path)) as first:
        expected = ask(first, TEXT)[0]
    goes_on = threading.Event()
    with closing(load(model, tmp_path)) as engine:
        read = engine._prompt_cache._folder.read
        monkeypatch.setattr(engine._prompt_cache._folder, "read", lambda *a: goes_on.wait(20) and read(*a))
        engine.submit(Submission("long", TEXT, GREEDY, seed=7))
        engine.submit(Submission("short", [5, 6, 7], GREEDY, seed=7))
        outputs = {"long": [], "short": []}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id].append(output)
            engine.check_integrity()
            if outputs["short"] and outputs["short"][-1].finish_reason:
                assert outputs["long"] or goes_on.is_set() or not goes_on.set()
    assert tokens(outputs["long"]) == expected
    assert outputs["long"][-1].num_cached_tokens == 144


def test_blocks_that_are_given_to_others_before_they_are_written_are_not_written(model, tmp_path, monkeypatch):
    """The thread that writes comes late: by then some blocks hold keys and values of another text."""
    goes_on = threading.Event()
    with closing(load(model, tmp_path, num_blocks=13)) as engine:
        cache = engine._prompt_cache
        write = cache._folder.write
        monkeypatch.setattr(cache._folder, "write", lambda *a: goes_on.wait(20) and write(*a))
        expected = ask(engine, TEXT)[0]
        before = kept_blocks(engine)
        ask(engine, TEXT[::-1])
        after = kept_blocks(engine)
        assert 0 < len(before.keys() & after.keys()) < len(before)
        goes_on.set()
    with closing(load(model, tmp_path)) as engine:
        assert ask(engine, TEXT)[0] == expected
        assert 0 < engine.stats().prompt_cache_hit_tokens_total < 144


@pytest.mark.parametrize("fault", ["full", "read error", "no room"])
def test_faults_change_nothing_but_the_time(model, tmp_path, monkeypatch, caplog, fault):
    with closing(load(model, tmp_path)) as first:
        expected = ask(first, TEXT)[0]
    with closing(load(model, tmp_path)) as engine:
        cache = engine._prompt_cache

        def refuse(*_):
            raise CapacityError("too little") if fault == "no room" else OSError(5, "Input/output error")

        target = {
            "full": (cache._folder, "write"),
            "read error": (cache._folder, "read"),
            "no room": (cache, "_make_room"),
        }
        monkeypatch.setattr(*target[fault], refuse)
        assert ask(engine, TEXT)[0] == expected
        assert ask(engine, TEXT[::-1])[1] == 0
        for job in cache._to_write:
            job.result(10)
        assert engine.stats().is_prompt_cache_writing == (fault != "full")
    assert {"full": "read only from now on", "read error": "cannot be read", "no room": "too little"}[
        fault
    ] in caplog.text


def test_a_folder_that_cannot_be_made_is_refused_before_loading(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--prompt-cache"):
        load(model, tmp_path / "file" / "below")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_everybody_may_write_is_refused_before_loading(model, tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"can be written by every user .*, so prompts .*chmod 700"):
        load(model, tmp_path)


def test_everything_is_closed_even_if_a_part_cannot_be(model, tmp_path, monkeypatch):
    before = set(threading.enumerate())
    engine = load(model, tmp_path)
    ask(engine, TEXT[:50])

    def breaks(*_):
        raise OSError("broken")

    monkeypatch.setattr(engine._prompt_cache._finder, "close", breaks)
    monkeypatch.setattr(engine._runner._forward, "close", breaks)
    finder = engine._prompt_cache._finder
    with pytest.raises(OSError, match="broken"):
        engine.close()
    monkeypatch.undo()
    finder.close()
    assert not {thread for thread in threading.enumerate() if thread.is_alive()} - before


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"prefix_caching": False}, "not shared"),
        ({"num_ranks": 2}, "ranks"),
        ({"device": "emulated:1MiB,1"}, "--prompt-cache"),
    ],
)
def test_what_has_no_prefixes_in_its_memory_is_refused(model, tmp_path, changes, cause):
    with pytest.raises(ConfigError, match=cause):
        load(model, tmp_path, **changes)


def damage_in_place(stream, place: float, cuts: bool) -> None:
    size = stream.seek(0, os.SEEK_END)
    if size == 0:  # cut to nothing before
        return
    at = int(place * (size - 1))
    if cuts:
        stream.truncate(at)
        return
    stream.seek(at)
    changed = bytes([stream.read(1)[0] ^ 0x40])
    stream.seek(at)
    stream.write(changed)


class Restarts(RuleBasedStateMachine):
    """Requests, restarts, damage and eviction in any order: every answer is that of an engine without a cache.

    Drawn values do not depend on threads: a rule without input does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.root / f"c{next(self.numbers)}"
        self.names = map(str, itertools.count())
        self.engine = None
        self.begin(30)

    @rule(num_blocks=st.sampled_from([13, 30]))
    def restart(self, num_blocks):
        self.engine.close()
        self.begin(num_blocks)

    def begin(self, num_blocks):
        self.engine = load(self.model, self.cache, num_blocks=num_blocks, prompt_cache_bytes=40_000)
        self.asked = {}

    @rule(first=st.integers(0, 1), length=st.integers(50, 150), max_tokens=st.integers(1, 20), seed=st.integers(0, 1))
    def submit(self, first, length, max_tokens, seed):
        sampling = dataclasses.replace(SAMPLED if seed else GREEDY, max_tokens=max_tokens)
        name = next(self.names)
        self.asked[name] = submission = Submission(name, TEXT[first:length], sampling, seed)
        self.engine.submit(submission)

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.step()

    @rule()
    def cancel(self):
        if self.asked:
            name = next(iter(self.asked))
            del self.asked[name]
            self.engine.cancel([name])

    @rule(which=st.integers(0, 99), place=st.floats(0, 1), cuts=st.booleans())
    def damage(self, which, place, cuts):
        files = sorted(self.cache.glob("*.moekv"))
        if files:
            # In place: the engine may delete the file meanwhile, and none may come back that it does not count.
            with suppress(FileNotFoundError), files[which % len(files)].open("r+b") as stream:
                damage_in_place(stream, place, cuts)

    @rule()
    def delete(self):
        for file in sorted(self.cache.glob("*.moekv"))[:1]:
            file.unlink(missing_ok=True)

    def step(self):
        for output in self.engine.step():
            assert output.error is None
            submission = self.asked.get(output.request_id)
            if submission is not None:
                submission.generated_token_ids.extend(output.token_ids)
                if output.finish_reason is not None:
                    assert submission.generated_token_ids == self.answer(self.asked.pop(output.request_id))
        self.engine.check_integrity()

    def answer(self, submission) -> list[int]:
        key = (tuple(submission.prompt_token_ids), submission.sampling.max_tokens, submission.seed)
        if key not in self.expected:
            alone = msgspec.structs.replace(submission, request_id="alone", generated_token_ids=[])
            self.expected[key] = tokens(run(self.plain, [alone])["alone"])
        return self.expected[key]

    def teardown(self):
        while self.engine.has_work:
            self.step()
        self.engine.close()
        assert not self.asked
        assert sum(file.stat().st_size for file in self.cache.glob("*.moekv")) <= 40_000


@pytest.mark.slow
def test_restarts_damage_and_eviction_never_show_in_answers(model, tmp_path):
    Restarts.model, Restarts.root, Restarts.numbers, Restarts.expected = model, tmp_path, itertools.count(), {}
    with closing(load(model)) as Restarts.plain:
        machine = Restarts.TestCase
        machine.settings = settings(max_examples=8, stateful_step_count=25)
        machine("runTest").runTest()

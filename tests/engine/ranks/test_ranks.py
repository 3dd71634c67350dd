"""Processes that share the experts answer like one with all of them, and end at the same time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import time

import msgspec
import psutil
import pytest

from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CapacityError, ConfigError, GroupError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.engine.engine import Engine
from moeflow.engine.ranks.rank_processes import LENGTH_BYTES, RankStart
from moeflow.kernels.cpu import extension
from moeflow.models.pass_input import PassInput
from moeflow.parallel.child_processes import close_pipe, start_rank
from moeflow.parallel.shared_memory_group import make_descriptor
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.resolve import resolve
from moeflow.processes.supervisor import Supervisor
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers, run
from tests.processes.test_process import in_this_process
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
LONG = [(7 * index) % 250 + 2 for index in range(400)]  # tokens whose results travel in both ways
PROMPTS = [[5, 9, 200, 31, 7], LONG, [100]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, hidden_size=128, num_local_experts=5)  # which no number of ranks divides
    return str(folder)


def config_of(model, **settings):
    return resolve(Settings(model=model, kv_cache_bytes=2**22, num_threads=2, **settings)).config


@pytest.mark.slow
@pytest.mark.parametrize(  # floats: when experts move, below, and in test_layouts.py
    "formats",
    [*(pytest.param(it, marks=pytest.mark.thorough) for it in ({}, {"quantize": "int8"})), {"quantize": "int4"}],
    ids=str,
)
def test_tokens_are_those_of_one_process_and_ranks_end_with_the_engine(model, tmp_path, formats):
    """Each rank takes its part of the model itself, or of a packed file; and they end in the midst of a request."""
    want = run(config_of(model, **formats), PROMPTS)
    assert run(config_of(model, num_ranks=2, **formats), PROMPTS) == want
    assert children() == []
    pack(model, None, cache_dir=tmp_path, **formats)
    mapped = config_of(model, num_ranks=3, cache_dir=tmp_path, **formats)
    assert mapped.packed_file
    engine = Engine.load(mapped)
    assert len(children()) == 2
    assert answers(engine, PROMPTS) == (want, {})
    submit(engine)
    engine.close()
    assert children() == []


@pytest.mark.slow
def test_experts_move_while_tokens_stay_the_same(model, in_threads):
    """150 passes over favourite tokens: loads are looked at twice, and then experts move."""
    want, _ = answers_with_stats(config_of(model))
    found, stats = answers_with_stats(config_of(model, num_ranks=3, num_redundant_experts=4))
    assert found == want
    assert stats.expert_moves_total > 0
    assert sum(rank.num_experts for rank in stats.ranks) > 2 * 5
    assert all(rank.waited_s_total > 0 for rank in stats.ranks)
    assert sum(rank.tokens_per_pass for rank in stats.ranks) > 0
    stay, stats = answers_with_stats(config_of(model, num_ranks=3, expert_placement="index"))
    assert stay == want
    assert stats.expert_moves_total == 0
    assert stats.rank_imbalance > 1


def answers_with_stats(config):
    engine = Engine.load(config)
    try:
        return answers(engine, num_tokens=150), engine.stats()
    finally:
        engine.close()


def is_rank(process):
    return "moeflow.engine.ranks.main" in " ".join(process.cmdline())


def children():
    return [it for it in psutil.Process().children() if is_rank(it)]


def step_often(engine):
    for _ in range(100):
        engine.step()


def step_for_long(engine):
    for _ in range(1000):
        engine.step()
        time.sleep(0.01)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def submit(engine):
    engine.submit(Submission("a", PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True), seed=1))
    assert engine.step()


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine_with_an_error_that_names_it(model):
    engine = Engine.load(config_of(model, num_ranks=2))
    try:
        submit(engine)
        (rank,) = children()
        os.kill(rank.pid, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(GroupError, match=f"rank 1 .*{rank.pid}"):
            step_often(engine)
        assert time.monotonic() - start_s < 30  # long before the deadline of a collective
    finally:
        engine.close()


@pytest.mark.slow
def test_an_engine_without_work_notices_that_a_rank_is_gone(model):
    engine = Engine.load(config_of(model, num_ranks=2))
    try:
        assert engine.step() == []
        (rank,) = children()
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match=rf"rank 1 .*process {rank.pid} has been stopped") as caught:
            step_for_long(engine)
        assert caught.value.is_from_outside
        os.kill(rank.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # all its threads have ended; its exit code stays
        with pytest.raises(GroupError, match=f"rank 1 .*{rank.pid} ended with -9") as caught:
            engine.step()
        assert caught.value.signal_number == signal.SIGKILL
        with pytest.raises(GroupError, match=f"rank 1 .*{rank.pid} ended with -9"):  # also as a request comes
            submit(engine)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_model_that_a_rank_cannot_load_is_an_error_at_the_start(model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    config = config_of(model, num_ranks=2)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(GroupError, match="rank 1 of the engine"):
        Engine.load(config)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_ranks": 6, "expert_layout": "expert"}, "6 ranks .* only 5 experts"),
        ({"num_ranks": 2, "num_redundant_experts": 6}, "at most 5, .* each of 2 ranks"),
        ({"num_ranks": 2, "num_redundant_experts": 1, "expert_placement": "index"}, "--expert-placement load"),
        ({"num_redundant_experts": 1}, "--redundant-experts 1 is for several ranks: set their number .--ranks"),
        ({"expert_placement": "index"}, "--expert-placement index is for several ranks"),
        (
            {"num_ranks": 2, "expert_placement": "index", "expert_layout": "sliced"},
            "--expert-placement index is for whole",
        ),
        ({"stages": "2", "device": "emulated:64MiB,1,torch"}, "--stages does not go with a device"),
        (
            {"num_ranks": 2, "num_redundant_experts": 2, "device": "emulated:64MiB,1,torch"},
            "--redundant-experts does not go with a device",
        ),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(model, settings, complaint):
    with pytest.raises((ConfigError, CapacityError), match=complaint):
        config_of(model, **settings)


def test_each_rank_has_keys_and_values_of_its_own(model):
    here = dataclasses.replace(host_resources(), available_bytes=2**32)

    def kv_bytes(num_ranks):
        return resolve(
            Settings(model=model, max_num_seqs=10**5, num_ranks=num_ranks), resources=here
        ).config.kv_cache_bytes

    assert 2 * kv_bytes(2) < kv_bytes(1)


def test_a_dense_model_has_no_experts_to_share_but_heads(tmp_path):
    write_tiny_llama(tmp_path)
    config = config_of(str(tmp_path), num_ranks=2)
    assert config.parallel.attention_layout == "tensor"
    with pytest.raises(ConfigError, match="without experts"):
        config_of(str(tmp_path), num_ranks=2, attention_layout="replicated")
    for said in ({"expert_layout": "sliced"}, {"expert_placement": "index"}, {"num_redundant_experts": 1}):
        with pytest.raises(ConfigError, match=r"--(expert|redundant).* is for models with experts"):
            config_of(str(tmp_path), num_ranks=2, **said)


def test_threads_are_divided_and_the_choice_has_a_reason(model):
    plan = resolve(Settings(model=model, num_threads=5, num_ranks=2)).plan
    assert (plan.config.num_threads, plan.config.parallel.num_ranks) == (2, 2)
    about = dict(plan.reasons)["ranks"]
    assert about == "2: each has 2 or 3 of the 5 experts of a layer, moved as loads call for it"
    asked = Settings(model=model, num_ranks=3, num_redundant_experts=2)
    assert resolve(asked).config.parallel.num_redundant_experts == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"num_ranks": 2}, pytest.param({"stages": "2"}, marks=pytest.mark.thorough)], ids=str
)
def test_streams_survive_ranks_that_are_killed(model, layout):
    """The supervisor restarts all ranks; streams continue with the tokens of one process."""
    asked = [
        Submission("greedy", [5, 6, 7], SamplingParams(max_tokens=150, temperature=0, ignore_eos=True), seed=0),
        Submission("drawn", [8] * 100, SamplingParams(max_tokens=150, ignore_eos=True), seed=4),
    ]

    async def read(engine, each):
        return [token async for output in engine.stream(each) for token in output.token_ids]

    async def after_a_death():
        supervisor = await Supervisor.start(config_of(model, **layout))
        reading = asyncio.gather(*(read(supervisor, each) for each in asked))
        await until(lambda: supervisor.stats().num_running > 0)
        next(it for it in psutil.Process().children(recursive=True) if is_rank(it)).kill()
        await until(lambda: supervisor.state is EngineState.RESTARTING)
        found, restarts = await reading, supervisor.stats().engine_restarts_total
        await supervisor.shutdown(5)
        return found, restarts

    found, restarts = asyncio.run(after_a_death())
    assert found == in_this_process(config_of(model), asked)
    assert restarts == 1
    assert not [it for it in psutil.Process().children(recursive=True) if is_rank(it)]


@pytest.mark.slow
def test_a_rank_that_was_stopped_ends_by_itself_when_it_goes_on_and_its_engine_is_gone(model):
    """In the pass that it was given, as a head that was killed leaves it; no deadline has to pass."""
    descriptor = make_descriptor(2)
    rank = start_rank("moeflow.engine.ranks.main", [descriptor], 1)
    os.close(descriptor)
    head = subprocess.Popen(["sleep", "600"])
    config = config_of(model, num_ranks=2)
    patient = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout_s=600.0))
    try:
        say(rank, RankStart(patient, [head.pid, rank.pid]))
        assert rank.stdout.read(1)
        os.kill(rank.pid, signal.SIGSTOP)
        say(rank, PassInput(PROMPTS[0], starts=[0], num_tokens=[5], block_ids=[(0,)], logit_rows=[[4]]))
        head.kill()
        head.wait()
        close_pipe(rank.stdin)
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.wait(60) == 1
    finally:
        for process in (rank, head):
            process.kill()
            process.wait()
        close_pipe(rank.stdout)


def say(rank, message):
    data = msgspec.msgpack.encode(message)
    rank.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    rank.stdin.flush()

"""A model some of whose experts lenders have: the tokens of the resident one, whatever becomes of the lenders."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moeflow.cli.chaos.deployment import free_port
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, LenderConfig, RemoteExpertsConfig
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DISK, RAM, Link, LinkRate
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.experts.remote import borrowing, lender, remote_experts, remote_lender
from moeflow.experts.remote.borrowing import LinkRates
from moeflow.experts.remote.lender import Lender
from moeflow.kernels.cpu import extension
from moeflow.parallel.remote import lending as messages
from moeflow.parallel.tcp.same_bits import own_processor, own_software
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.choices.remote_choice import choose_remote
from moeflow.planner.costs.disk_waits import DiskRates
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers, run
from tests.experts.remote.lenders import TOKEN, running_lender, wait_for
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
NUM_EXPERTS = 24  # of all layers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=8, num_hidden_layers=3)
    return str(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    monkeypatch.setattr("moeflow.experts.remote.borrowing._PROBE_S", 0.01)
    monkeypatch.setattr(remote_lender, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_lender, "_MAX_PAUSE_S", 0.05)


@pytest.fixture
def always_away(monkeypatch):
    """Send away all that can be: a disk of tiny models is faster than any network."""
    monkeypatch.setattr(remote_experts.Split, "choose", lambda self, candidates, costs, **_: list(candidates))
    monkeypatch.setattr(remote_experts.Trial, "_begin", lambda self: setattr(self, "is_on", True))
    monkeypatch.setattr(remote_experts.Trial, "end_pass", lambda *_: None)


@pytest.fixture(scope="module")
def expected(model):
    return {quantize: run(resident_config(model, quantize)) for quantize in (None, "int8")}


def resident_config(model, quantize=None) -> EngineConfig:
    return resolve(Settings(model=model, num_threads=1, kv_cache_bytes=2**20, quantize=quantize)).config


def write_token(file: Path) -> Path:
    file.touch(0o600)
    file.write_bytes(TOKEN)
    return file


def remote_config(model, tmp_path, lenders, num_slots=6, quantize=None, predictor="none") -> EngineConfig:
    token_file = write_token(tmp_path / "token")
    file = tmp_path / f"slabs-{quantize}"
    experts = ExpertSlotsConfig(
        packed_weights_file=str(file),
        num_slots=num_slots,
        slab_bytes=pack(model, file, cache_dir=None, quantize=quantize).spec.slab_bytes,
        predictor=predictor,
        remote=RemoteExpertsConfig(
            lenders=tuple(LenderConfig(host=it.address[0], port=it.address[1]) for it in lenders),
            token_file=str(token_file),
        ),
    )
    return dataclasses.replace(resident_config(model, quantize), experts=experts)


def remote_of(engine: Engine) -> remote_experts.RemoteExperts:
    return engine._runner._experts.pool.remote


def settled(engine: Engine, num_elsewhere: int) -> None:
    wait_for(lambda: remote_of(engine).placed.sum() == num_elsewhere)


@pytest.mark.parametrize(("quantize", "predictor"), [(None, "next-router"), ("int8", "none")])
def test_tokens_are_those_of_the_resident_model_while_experts_are_on_their_way_and_after(
    model, tmp_path, always_away, expected, quantize, predictor
):
    with running_lender() as first, running_lender(8 << 20) as second:
        config = remote_config(model, tmp_path, (first, second), quantize=quantize, predictor=predictor)
        with closing(Engine.load(config)) as engine:
            assert answers(engine) == (expected[quantize], {})
            settled(engine, NUM_EXPERTS)
            assert answers(engine) == (expected[quantize], {})
            assert sum(lender.counters.num_pairs for lender in remote_of(engine).lenders) > 0
        wait_for(lambda: first.lender.free_bytes == 1 << 28)
        assert first.num_held == 0
        wait_for(lambda: first.said("has gone, with"))


class Interrupted:
    """Does something to a lender when a number of its results have been awaited, in the midst of a pass."""

    def __init__(self, monkeypatch, action, after=5) -> None:
        take = remote_experts.SentWork._take
        num_taken = 0

        def counted(sent, message, pairs):
            nonlocal num_taken
            num_taken += 1
            if num_taken == after:
                action()
            take(sent, message, pairs)

        monkeypatch.setattr(remote_experts.SentWork, "_take", counted)


@pytest.fixture
def impatient(monkeypatch):
    for module in (remote_experts, borrowing):
        monkeypatch.setattr(module, "REACTION_S", 0.3)
    monkeypatch.setattr(lender, "SILENCE_S", 1.0)


def lost_in_the_midst(model, tmp_path, monkeypatch, expected, action, running):
    """Answer while a lender is lost, and again once it is back; return the engine's lenders."""
    with closing(Engine.load(remote_config(model, tmp_path, (running,)))) as engine:
        settled(engine, NUM_EXPERTS)
        with monkeypatch.context() as patch:
            Interrupted(patch, action)
            assert answers(engine) == (expected[None], {})
            assert not remote_of(engine).placed.any()
        yield
        settled(engine, NUM_EXPERTS)
        before = remote_of(engine).lenders[0].counters.num_pairs
        assert answers(engine) == (expected[None], {})
        assert remote_of(engine).lenders[0].counters.num_pairs > before


def test_a_cut_wire_costs_a_moment_and_no_token_and_the_lender_is_used_again_when_it_is_mended(
    model, tmp_path, monkeypatch, always_away, impatient, expected, caplog
):
    with running_lender() as running:
        for _ in lost_in_the_midst(model, tmp_path, monkeypatch, expected, running.proxy.cut, running):
            wait_for(lambda: running.num_held == 0)  # it takes the head to be gone, and gives its memory back
            wait_for(lambda: running.said("has not sent that it is there within 1 s"))
            running.proxy.mend()
    said = [record.message for record in caplog.records if "are read from disk" in record.message]
    assert said[0].endswith("; retrying")
    assert len(said) == len(set(said)) <= 4, said


def test_a_lender_that_ends_costs_no_token_and_another_in_its_place_is_used(
    model, tmp_path, monkeypatch, always_away, expected
):
    with ExitStack() as stack:
        running = stack.enter_context(running_lender())
        for _ in lost_in_the_midst(model, tmp_path, monkeypatch, expected, running.lender.close, running):
            running.lender = Lender(1 << 28, num_threads=1, cpu_isa="", on_news=running.news.append)
            running.endpoint._on_link = running.lender.take_in


def test_experts_that_a_lender_has_dropped_come_from_disk(model, tmp_path, monkeypatch, always_away, expected):
    with running_lender() as running, closing(Engine.load(remote_config(model, tmp_path, (running,)))) as engine:
        settled(engine, NUM_EXPERTS)
        (head,) = running.lender._heads.values()
        for number in range(0, NUM_EXPERTS, 2):
            head.loan.drop(number)
        assert answers(engine) == (expected[None], {})


def test_an_engine_goes_on_without_a_lender_that_refuses_and_says_why_once(model, tmp_path, expected, caplog):
    with running_lender(1 << 12) as small, running_lender(token=b"another token, as long") as other:
        with closing(Engine.load(remote_config(model, tmp_path, (small, other)))) as engine:
            wait_for(lambda: caplog.text.count("retrying") == 2)
            assert answers(engine) == (expected[None], {})
            assert not remote_of(engine).placed.any()
        assert small.said("nothing is lent: 4.0 KiB of 4.0 KiB are not lent yet, and one expert takes 2.0 MiB")
    assert "the token is refused" in caplog.text
    assert "lend more (--memory), or end another head" in caplog.text
    assert caplog.text.count("retrying") == 2


@contextlib.contextmanager
def lending(port: int, token_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `moeflow lend`."""
    verb = (sys.executable, "-m", "moeflow.cli.main", "lend", "--listen", f"{port}", "--memory", "256MiB")
    command = [*verb, "--threads", "1", "--cluster-token-file", str(write_token(token_file))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "lending 256.0 MiB" in process.stderr.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_costs_no_token(
    model, tmp_path, monkeypatch, always_away, impatient, expected, death
):
    """The same with `moeflow lend` itself."""
    port = free_port()
    with lending(port, tmp_path / "token") as process:
        config = remote_config(model, tmp_path, (SimpleNamespace(address=("127.0.0.1", port)),))
        with closing(Engine.load(config)) as engine:
            settled(engine, NUM_EXPERTS)
            with monkeypatch.context() as patch:
                Interrupted(patch, lambda: process.send_signal(death))
                assert answers(engine) == (expected[None], {})
            assert not remote_of(engine).placed.any()
            if death is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                settled(engine, NUM_EXPERTS)
                assert answers(engine) == (expected[None], {})
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130


def test_a_plan_says_what_lenders_bring_and_leaves_slow_ones_away(model, tmp_path, monkeypatch):
    disk = Link(source=DISK, target=RAM, rates=(LinkRate(transfer_bytes=1 << 20, bytes_per_s=1e9),))
    slots = ExpertSlotsConfig(packed_weights_file="x", num_slots=6, slab_bytes=1 << 20)
    with running_lender() as running:
        borrowing_now = messages.Borrowing(
            software=own_software(),
            processor=own_processor(),
            cpu_isa="generic",
            hidden=32,
            width=48,
            weight_format="float32",
            is_wide=False,
            num_layers=3,
            num_experts=8,
            num_wanted=0,
        )
        where = f"127.0.0.1:{running.proxy.port}"
        token_file = write_token(tmp_path / "token")
        settings = Settings(model=model, remote_experts=f"{where}, 127.0.0.1:1", cluster_token_file=token_file)

        def chosen(bytes_per_s):
            rates = LinkRates(1e-4, bytes_per_s)
            monkeypatch.setattr(borrowing.Borrowed, "measure", lambda _: rates)
            return choose_remote(settings, slots, borrowing_now, DiskRates(link=disk, expert_bytes=1 << 20))

        fast, slow = chosen(1e9), chosen(1e4)
        assert [it.num_experts for it in fast.config.lenders] == [256, 0]
        assert f"24 experts fit at {where} with a round trip of 0.1 ms" in fast.reason
        assert slow.config is None
        assert "not used: an expert that one token needs takes 25.8 ms there, 1.05 ms from disk" in slow.reason
        refused = msgspec.structs.replace(borrowing_now, software="moeflow 0")
        with pytest.raises(ConfigError, match=r"lends nothing .*: this lender computes otherwise: it is moeflow .*"):
            choose_remote(settings, slots, refused, None)
        wait_for(lambda: running.said("nothing is lent: this lender computes otherwise"))
        running.proxy.cut()
    with pytest.raises(ConfigError, match="'here' is no address"):
        choose_remote(dataclasses.replace(settings, remote_experts="here"), slots, borrowing_now, None)

"""Replicas that share experts give the tokens of one engine, even if a replica is lost or does not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.in_flight_choice import InFlightChoice
from moeflow.kernels.cpu import extension
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.parallel.remote import expert_peers, expert_service
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.test_speculation import Drafts
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
FORMATS = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}]
PROMPTS = [[5, 9, 200, 31, 7], [100], list(range(40, 90)), [3, 3, 3], [77, 12], list(range(100, 130))]
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder / "mixtral", num_local_experts=5)
    write_tiny_mixtral(folder / "deep", num_hidden_layers=6)
    return folder


def config_of(model, **settings):
    return resolve(Settings(model=str(model), num_threads=1, kv_cache_bytes=2**20, **settings)).config


def shared_config(model, number, **settings):
    return config_of(model, num_replicas=number, expert_parallel=True, is_served=True, **settings)


def submissions(prompts=PROMPTS, num_tokens=16):
    return [
        Submission(
            f"{number}",
            list(prompt),
            SamplingParams(temperature=number % 2 * 0.9, max_tokens=num_tokens, ignore_eos=True),
            seed=number,
        )
        for number, prompt in enumerate(prompts)
    ]


def run(engine: Engine, asked, on_pass=lambda: None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {each.request_id: [] for each in asked}
    for each in asked:
        engine.submit(each)
    while engine.has_work:
        on_pass()
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
    engine.check_integrity()
    return found


def run_alone(config, asked) -> dict[str, list[int]]:
    with contextlib.closing(Engine.load(config)) as engine:
        return run(engine, asked)


class Replicas:
    """Engines of one process that share experts, each in its own thread while it runs."""

    def __init__(self, config, folder) -> None:
        self.config, self.folder = config, folder
        self.engines = [self.start(number) for number in range(config.expert_parallel.num_replicas)]

    def start(self, number: int) -> Engine:
        own = dataclasses.replace(self.config.expert_parallel, replica=number, folder=str(self.folder))
        return Engine.load(dataclasses.replace(self.config, expert_parallel=own))

    def wait_until_connected(self) -> None:
        for _ in range(int(PATIENCE_S * 100)):
            if all(engine.stats().num_peers == len(self.engines) - 1 for engine in self.engines):
                return
            threading.Event().wait(0.01)
        pytest.fail("replicas do not find each other")

    def run(self, asked) -> dict[str, list[int]]:
        """Have each compute some of the requests, all at once."""
        shares = [asked[number :: len(self.engines)] for number in range(len(self.engines))]
        with ThreadPoolExecutor(len(self.engines)) as threads:
            found = threads.map(run, self.engines, shares)
        return {name: tokens for each in found for name, tokens in each.items()}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture
def replicas(models, tmp_path):
    config = shared_config(models / "deep", 2, cache_dir=tmp_path)
    with contextlib.closing(Replicas(config, tmp_path)) as found:
        found.wait_until_connected()
        yield found


@pytest.mark.parametrize("formats", FORMATS, ids=lambda it: "".join(it.values()))
@pytest.mark.parametrize("number", [2, 3])
def test_tokens_are_those_of_one_engine(models, tmp_path, formats, number):
    expected = run_alone(config_of(models / "mixtral", **formats), submissions())
    config = shared_config(models / "mixtral", number, cache_dir=tmp_path, **formats)
    with contextlib.closing(Replicas(config, tmp_path)) as replicas:
        replicas.wait_until_connected()
        assert replicas.run(submissions()) == expected
        each = [engine.stats() for engine in replicas.engines]
    assert all(stats.peer_rows_sent_total and stats.peer_pairs_served_total for stats in each)
    assert all(stats.peer_wait_s_total > 0 and stats.peer_serve_s_total > 0 for stats in each)
    assert not any(stats.peer_pairs_taken_over_total for stats in each)


def in_flight(monkeypatch, number: int) -> list[int]:
    """Have passes cut into so many micro-batches; return a list that will hold how many there were of each."""
    found: list[int] = []
    monkeypatch.setattr(InFlightChoice, "choose", lambda self, tokens, sequences, most: min(number, most))
    monkeypatch.setattr(InFlightChoice, "note", lambda self, *given: found.append(given[2]))
    return found


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_tokens_do_not_depend_on_the_number_of_micro_batches_in_flight(models, tmp_path, monkeypatch, number):
    prompts = [*PROMPTS, PROMPTS[2], [*PROMPTS[2], 9], PROMPTS[5]]  # some begin with what others have in the same pass
    expected = run_alone(config_of(models / "deep"), submissions(prompts))
    found = in_flight(monkeypatch, number)
    with contextlib.closing(Replicas(shared_config(models / "deep", 2, cache_dir=tmp_path), tmp_path)) as replicas:
        replicas.wait_until_connected()
        assert run(replicas.engines[0], submissions(prompts)) == expected
        assert replicas.run(submissions(prompts)) == expected
    assert max(found) == number


def test_drafted_trees_are_checked_in_several_micro_batches(models, tmp_path, monkeypatch):
    expected = run_alone(config_of(models / "deep"), submissions())
    found = in_flight(monkeypatch, 3)
    config = shared_config(models / "deep", 2, cache_dir=tmp_path, speculators=("suffix",))
    drafts = Drafts(expected)
    with contextlib.closing(Replicas(config, tmp_path)) as replicas:
        replicas.wait_until_connected()
        replicas.engines[0]._speculation = drafts
        assert run(replicas.engines[0], submissions()) == expected
    assert drafts.counts.kept
    assert max(found) == 3


def test_a_pass_that_fails_in_one_micro_batch_fails_when_the_others_are_through(models, replicas, monkeypatch):
    in_flight(monkeypatch, 3)
    engine = replicas.engines[0]
    first = engine._runner.model.layers[0]
    calls = itertools.count()
    attention = DecoderLayer.attention

    def fail_once(layer, *given):
        if layer is first and next(calls) == 1:
            raise RuntimeError("no such luck")
        return attention(layer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderLayer, "attention", fail_once)
        for each in submissions():
            engine.submit(each)
        outputs = engine.step()
    assert {output.error for output in outputs} != {None}
    engine.check_integrity()
    while engine.has_work:
        engine.step()
    assert run(engine, submissions()) == run_alone(config_of(models / "deep"), submissions())


def test_a_long_prompt_goes_in_several_messages(models, tmp_path, monkeypatch):
    monkeypatch.setattr("moeflow.models.layers.expert_shares.max_rows", lambda hidden, top_k: 7)
    expected = run_alone(config_of(models / "mixtral"), submissions())
    with contextlib.closing(Replicas(shared_config(models / "mixtral", 2, cache_dir=tmp_path), tmp_path)) as replicas:
        replicas.wait_until_connected()
        assert replicas.run(submissions()) == expected


def test_alone_a_replica_computes_everything_until_the_others_are_there(models, tmp_path):
    expected = run_alone(config_of(models / "deep"), submissions())
    replicas = Replicas(shared_config(models / "deep", 2, cache_dir=tmp_path), tmp_path)
    with contextlib.closing(replicas):
        replicas.wait_until_connected()
        lost = replicas.engines.pop()
        lost.close()
        (engine,) = replicas.engines
        assert run(engine, submissions()) == expected
        taken_over = engine.stats().peer_pairs_taken_over_total
        assert taken_over
        assert not engine.stats().num_peers
        replicas.engines.append(replicas.start(1))
        replicas.wait_until_connected()
        assert replicas.run(submissions()) == expected
        assert engine.stats().peer_pairs_taken_over_total == taken_over


def test_a_replica_that_is_lost_within_a_pass_is_replaced_by_the_file(models, replicas, monkeypatch):
    """Its service dies with work of the others before it: the links end, and nothing was answered."""
    expected = run_alone(config_of(models / "deep"), submissions())
    engine, other = replicas.engines[0], replicas.engines.pop()
    asked = threading.Event()
    compute = expert_service.compute_pairs

    def answer_some(*arguments):
        if other.stats().peer_pairs_served_total > 100:
            asked.set()
            threading.Event().wait(0.2)
        return compute(*arguments)

    def end_other() -> None:
        assert asked.wait(PATIENCE_S)
        other.close()

    monkeypatch.setattr(expert_service, "compute_pairs", answer_some)
    thread = threading.Thread(target=end_other)
    thread.start()
    assert run(engine, submissions()) == expected
    thread.join()
    assert engine.stats().peer_pairs_taken_over_total


def test_a_replica_that_does_not_answer_is_given_up(models, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_peers, "PATIENCE_S", 0.1)
    expected = run_alone(config_of(models / "deep"), submissions())
    may_go, compute = threading.Event(), expert_service.compute_pairs

    def stop(*arguments):
        assert may_go.wait(PATIENCE_S)
        return compute(*arguments)

    with contextlib.closing(Replicas(shared_config(models / "deep", 2, cache_dir=tmp_path), tmp_path)) as replicas:
        replicas.wait_until_connected()
        monkeypatch.setattr(expert_service, "compute_pairs", stop)
        assert run(replicas.engines[0], submissions(num_tokens=3)) == {k: v[:3] for k, v in expected.items()}
        assert replicas.engines[0].stats().peer_pairs_taken_over_total
        may_go.set()
        monkeypatch.setattr(expert_peers, "PATIENCE_S", PATIENCE_S)
        replicas.wait_until_connected()


def test_only_its_own_experts_are_brought_in(models, tmp_path):
    config = shared_config(models / "mixtral", 2, cache_dir=tmp_path)
    with contextlib.closing(Replicas(config, tmp_path)) as replicas:  # the first makes the file
        brought: list[tuple[int, int]] = []
        own = dataclasses.replace(config.expert_parallel, replica=1, folder=str(tmp_path))
        shares = dataclasses.replace(config, expert_parallel=own)
        Engine.load(shares, lambda done, total: brought.append((done, total))).close()
        whole: list[tuple[int, int]] = []
        mapped = dataclasses.replace(config, expert_parallel=None)
        Engine.load(mapped, lambda done, total: whole.append((done, total))).close()
        assert len(replicas.engines) == 2
    spec = read_slab_index(Path(config.packed_file)).spec
    of_others = sum(map(spec.stride_bytes, range(spec.num_layers))) * 2  # this one has three of five
    assert brought[-1] == (whole[-1][1] - of_others, whole[-1][1] - of_others)

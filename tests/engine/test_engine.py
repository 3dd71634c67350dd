"""The step loop over a fake model: outputs, endings, cancellation, failure."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from moeflow.core.engine_messages import Submission, TokenOutput
from moeflow.core.errors import GroupError, RequestError, StorageError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.counters import WINDOW_S, Counters
from moeflow.engine.engine import Engine
from tests.engine.fake_runner import EOS, make_engine
from tests.engine.submissions import run, submission, tokens
from tests.scheduler.fake_model import VOCAB_SIZE, generate_alone


def test_tokens_come_one_a_pass_and_are_those_of_a_solo_run():
    engine, _ = make_engine()
    prompts = {"a": [1, 2, 3], "b": list(range(20)), "c": [9]}
    for name, prompt in prompts.items():
        engine.submit(submission(name, prompt))
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == generate_alone(prompt, 6)
        assert all(len(output.token_ids) == 1 for output in outputs[name])
        assert [o.finish_reason for o in outputs[name]] == [None] * 5 + [FinishReason.LENGTH]


def find_prompt(ending_in: int, within: int) -> tuple[list[int], int]:
    """A prompt whose solo run first produces that token after a few others."""
    for number in range(5000):
        prompt = [number % VOCAB_SIZE, number // VOCAB_SIZE]
        out = generate_alone(prompt, within)
        if ending_in in out[1:]:
            return prompt, out.index(ending_in)
    raise AssertionError


def test_the_models_eos_ends_a_request_unless_ignored():
    prompt, index = find_prompt(EOS, 6)
    engine, _ = make_engine()
    engine.submit(submission("stops", prompt, ignore_eos=False))
    engine.submit(submission("goes-on", prompt))
    outputs = run(engine)
    assert tokens(outputs["stops"]) == generate_alone(prompt, 6)[: index + 1]
    assert outputs["stops"][-1].finish_reason is FinishReason.STOP
    assert outputs["stops"][-1].stop_token_id is None
    assert len(tokens(outputs["goes-on"])) == 6


def test_a_stop_token_is_named():
    prompt, index = find_prompt(7, 6)
    engine, _ = make_engine()
    engine.submit(submission("a", prompt, stop_token_ids=(7,)))
    last = run(engine)["a"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 7)
    assert index >= 0


def test_max_tokens_none_runs_to_the_end_of_the_context():
    engine, _ = make_engine()
    engine.submit(submission("a", [1] * 40, max_tokens=None))
    assert len(tokens(run(engine)["a"])) == 8


def test_max_tokens_zero_gives_prompt_logprobs_only():
    engine, _ = make_engine()
    engine.submit(submission("a", list(range(20)), max_tokens=0, prompt_logprobs=0))
    (output,) = run(engine)["a"]
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [p.token_id for p in output.prompt_logprobs[1:]] == list(range(1, 20))


def test_prompt_logprobs_are_complete_after_a_preemption_in_the_middle():
    engine, _ = make_engine(num_blocks=12, max_num_batched_tokens=4)
    engine.submit(submission("old", [3], max_tokens=40))
    for _ in range(20):
        engine.step()
    engine.submit(submission("young", list(range(20)), max_tokens=3, prompt_logprobs=0))
    outputs = run(engine)
    assert engine.stats().preemptions_total > 0
    first = outputs["young"][0]
    assert [p.token_id for p in first.prompt_logprobs[1:]] == list(range(1, 20))


def test_cancellation_frees_place_and_blocks_within_one_pass():
    engine, _ = make_engine()
    for name in "abcde":  # four run, one waits
        engine.submit(submission(name, [1, 2, 3], max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.cancel(["a", "e", "unknown"])
    engine.check_integrity()
    assert engine.stats().num_running == 3
    assert engine.stats().num_waiting == 0
    endings = {o.request_id: o.finish_reason for o in engine.step() if o.finish_reason}
    assert endings == {"a": FinishReason.CANCELLED, "e": FinishReason.CANCELLED}
    engine.cancel_all()
    assert engine.stats().kv_blocks_used == 0
    assert {o.request_id for o in engine.step()} == {"b", "c", "d"}
    assert not engine.has_work


def test_without_work_it_looks_after_ranks_once_everything_is_handed_out():
    engine, runner = make_engine()
    runner.is_rank_gone = True
    engine.submit(submission("a", [1, 2, 3], max_tokens=2))
    assert [len(engine.step()) for _ in range(2)] == [1, 1]  # a pass finds out by itself
    engine.submit(submission("b", [1]))
    engine.cancel(["b"])
    assert [output.finish_reason for output in engine.step()] == [FinishReason.CANCELLED]
    with pytest.raises(GroupError, match="rank 1"):
        engine.step()


def test_a_failing_pass_ends_its_requests_and_the_engine_lives_on():
    engine, runner = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.submit(submission(name, list(range(8))))
    runner.fail_next = MemoryError("no memory left")
    failed = engine.step()
    assert {o.request_id for o in failed} == {"a"}
    assert all(o.finish_reason is FinishReason.ERROR and "no memory left" in o.error for o in failed)
    runner.model.slots.clear()  # nothing of the failed pass may be used
    outputs = run(engine)
    assert tokens(outputs["b"]) == tokens(outputs["c"]) == generate_alone(list(range(8)), 6)
    assert engine.stats().failed_passes_total == 1


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_only_requests_that_need_what_cannot_be_read_fail(policy, monkeypatch):
    engine, runner = make_engine(max_num_seqs=3, policy=policy)
    prompts = {"a": [1, 2, 3], "concerned": [0, 6, 7], "c": [9] * 7}
    poison = generate_alone(prompts["concerned"], 3)[-1]
    assert all(poison not in [*prompt, *generate_alone(prompt, 6)] for prompt in (prompts["a"], prompts["c"]))
    compute = runner.model.run

    def run_unless_poisoned(batch):
        result = compute(batch)
        if any(poison in e.request.token_ids(e.start, e.stop) for e in batch.entries):
            raise StorageError("layer 1, expert 2: cannot be read", file=Path("/somewhere/private/a.slabs"))
        return result

    monkeypatch.setattr(runner.model, "run", run_unless_poisoned)
    for name, prompt in prompts.items():
        engine.submit(submission(name, prompt))
    outputs = run(engine)
    error = outputs["concerned"][-1].error
    assert error == "the pass failed: StorageError: file a.slabs, layer 1, expert 2: cannot be read"
    assert tokens(outputs["concerned"]) == generate_alone(prompts["concerned"], 3)
    for name in "ac" if policy == "continuous" else ():
        assert tokens(outputs[name]) == generate_alone(prompts[name], 6)
        assert outputs[name][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 45}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
    ],
)
def test_what_can_never_run_is_refused(changes, param):
    engine, _ = make_engine()
    prompt = changes.pop("prompt", [1])
    with pytest.raises(RequestError) as caught:
        engine.submit(submission("a", prompt, **changes))
    assert caught.value.param == param
    assert not engine.has_work


def test_an_id_in_use_is_refused():
    engine, _ = make_engine()
    engine.submit(submission("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(submission("a", [1]))


def test_random_traffic_leaves_nothing_behind():
    rng = random.Random(5)
    engine, runner = make_engine()
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    for step in range(400):
        if step < 300 and rng.random() < 0.4:
            name, prompt = f"r{step}", [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
            expected[name] = generate_alone(prompt, 10)
            engine.submit(submission(name, prompt, max_tokens=10))
        if rng.random() < 0.05:
            engine.cancel([f"r{rng.randrange(step + 1)}"])
        if rng.random() < 0.02:
            runner.fail_next = rng.choice([RuntimeError("chance"), StorageError("chance")])
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()
    for outputs in run(engine).values():
        for output in outputs:
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason
    assert ended.keys() == expected.keys()
    for name, reason in ended.items():
        assert got.get(name, []) == expected[name][: len(got.get(name, []))]
        assert reason is not FinishReason.LENGTH or got[name] == expected[name]
    assert {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR} <= set(ended.values())
    stats = engine.stats()
    assert stats.kv_blocks_used == stats.num_running == stats.num_waiting == 0


def test_stats_count_what_happened():
    engine, _ = make_engine(max_num_batched_tokens=40)
    engine.submit(submission("a", list(range(10))))
    run(engine)
    engine.submit(submission("b", list(range(10))))
    outputs = run(engine)
    stats = engine.stats()
    assert outputs["b"][0].num_cached_tokens == 8
    assert (stats.prompt_tokens_total, stats.prefix_hit_tokens_total) == (12, 8)
    assert (stats.generated_tokens_total, stats.requests_finished_total) == (12, 2)


def test_speed_is_that_of_the_last_seconds():
    now = [0.0]
    counters = Counters(clock=lambda: now[0])
    engine, _ = make_engine()
    engine.submit(submission("a", [1]))
    batch = engine._scheduler.schedule()
    for _ in range(100):
        now[0] += 0.1
        counters.count_pass(batch, num_generated=2)
    assert counters.tokens_per_second() == pytest.approx(20.0)
    now[0] += WINDOW_S + 0.2
    assert counters.tokens_per_second() == 0.0


def test_a_job_leaves_the_next_pass_to_an_arrival_and_is_counted_apart():
    engine, runner = make_engine(max_num_seqs=2)
    for number in range(4):
        submission = Submission(
            f"job-{number}", [number + 1] * 3, SamplingParams(max_tokens=6, ignore_eos=True), 0, True
        )
        engine.submit(submission)
    engine.step()
    stats = engine.stats()
    assert (stats.num_batch_running, stats.num_batch_waiting) == (2, 2)
    engine.submit(Submission("chat", [7], SamplingParams(max_tokens=2, ignore_eos=True), 0))
    engine.step()
    assert "chat" in [entry.request.request_id for entry in runner.batches[-1].entries]
    assert engine.stats().num_running == engine.stats().num_batch_running + 1
    engine.check_integrity()


def progress_of(outputs: list[TokenOutput]) -> list[tuple[int, int, int, float]]:
    return [msgspec.structs.astuple(output.prompt_progress) for output in outputs if output.prompt_progress]


def test_a_request_that_asks_hears_after_each_pass_how_far_its_prompt_is():
    now_s = 100.0
    engine, runner = make_engine()
    engine = Engine(engine.config, runner, clock=lambda: now_s)
    prompt = list(range(20))
    engine.submit(submission("asks", prompt, prompt_progress=True))
    outputs: list[TokenOutput] = []
    while engine.has_work:  # the clock ticks between passes alone
        found = engine.step()
        now_s += 10.0
        outputs += found
    assert progress_of(outputs) == [(20, 0, 8, 0.0), (20, 0, 16, 10.0), (20, 0, 20, 20.0)]
    assert [bool(output.token_ids) for output in outputs] == [False] * 3 + [True] * 6
    assert tokens(outputs) == generate_alone(prompt, 6)
    assert outputs[0].queued_s == 0.0

    engine.submit(submission("again", [*prompt, 1, 2], prompt_progress=True))
    engine.submit(submission("silent", [*prompt, 3], max_tokens=2))
    outputs_of = run(engine)
    assert progress_of(outputs_of["again"]) == [(22, 20, 22, 0.0)]
    assert outputs_of["again"][0].num_cached_tokens == 20
    assert len(outputs_of["silent"]) == 2
    assert not progress_of(outputs_of["silent"])


def test_progress_after_a_preemption_is_that_of_the_prompt_alone():
    engine, _ = make_engine(num_blocks=12, max_num_batched_tokens=4)
    engine.submit(submission("old", [3], max_tokens=40))
    for _ in range(20):
        engine.step()
    engine.submit(submission("young", list(range(20)), max_tokens=8, prompt_progress=True))
    outputs = run(engine)
    assert engine.stats().preemptions_total > 0
    is_progress = [output.prompt_progress is not None for output in outputs["young"]]
    assert is_progress == sorted(is_progress, reverse=True)  # none while tokens that are there are computed again
    assert all(
        total == 20 and 0 <= cached <= computed <= 20 for total, cached, computed, _ in progress_of(outputs["young"])
    )
    assert tokens(outputs["young"]) == generate_alone(list(range(20)), 8)


def test_the_first_output_says_how_long_a_request_waited_for_its_first_pass():
    now_s = 100.0
    engine, runner = make_engine(max_num_seqs=1)
    engine = Engine(engine.config, runner, clock=lambda: now_s)
    engine.submit(submission("a", [1], max_tokens=2))
    now_s = 101.0
    engine.submit(submission("b", [2], max_tokens=2))
    waits = {}
    while engine.has_work:
        now_s += 10.0
        for output in engine.step():
            waits.setdefault(output.request_id, []).append(output.queued_s)
    assert waits == {"a": [11.0, None], "b": [30.0, None]}

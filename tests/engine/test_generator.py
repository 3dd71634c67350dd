"""Text over a fake engine: n completions, stop strings, cancellation, failures. No model, no clock."""

import asyncio
from contextlib import aclosing
from threading import Event

import pytest

from moeflow.core.errors import EngineError, QueueFullError, RequestError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.generator import MAX_CHECKS_WAITING, Generator
from moeflow.engine.merging import merge
from tests.engine.fakes import EOS, FakeEngine, byte_level_tokenizer, says

ANSWER = "the fox jumps over the lazy dog"


def make_generator(rule=None, **values):
    tokenizer = byte_level_tokenizer()
    engine = FakeEngine(rule or says(tokenizer, ANSWER), **values)
    return Generator(engine, tokenizer), engine


def collect(generator, **params):
    async def read():
        return [delta async for delta in generator.stream("r", [1, 2], SamplingParams(**{"max_tokens": 40, **params}))]

    return asyncio.run(read())


def text_of(deltas, index=0):
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_a_prompt_is_answered_piece_by_piece():
    generator, engine = make_generator()
    deltas = collect(generator)
    assert text_of(deltas) == ANSWER
    assert len(deltas) == engine.num_tokens > 5
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].token_ids == (EOS,)
    assert deltas[0].num_cached_tokens == 1
    assert engine.cancelled == []


def test_prompts_are_encoded():
    generator, _ = make_generator()
    assert asyncio.run(generator.encode(["the fox", [5, 6]])) == [generator.tokenizer.encode("the fox"), [5, 6]]
    messages = [{"role": "user", "content": "hi"}]
    assert asyncio.run(generator.encode_chat(messages)).token_ids == generator.tokenizer.apply_chat_template(messages)


def test_bad_requests_are_refused_before_anything_is_submitted():
    generator, engine = make_generator()
    with pytest.raises(RequestError, match="at most 62"):
        generator.stream("r", [1, 2], SamplingParams(max_tokens=63))
    with pytest.raises(RequestError, match="token id 400"):
        generator.stream("r", [400], SamplingParams())
    assert engine.submitted == []


def test_nothing_is_submitted_before_the_first_step():
    generator, engine = make_generator()

    async def abandon():
        stream = generator.stream("r", [1], SamplingParams(n=3))
        await stream.aclose()

    asyncio.run(abandon())
    assert engine.submitted == []


def test_a_stop_string_cancels_in_the_engine():
    generator, engine = make_generator()
    deltas = collect(generator, stop=("over",))
    assert text_of(deltas) == "the fox jumps "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "over")
    assert engine.cancelled == ["r-0"]
    assert engine.running == set()


def test_completions_arrive_as_they_come_and_end_separately():
    tokenizer = byte_level_tokenizer()
    answers = {"r-0": ANSWER, "r-1": "no", "r-2": "the dog"}
    rules = {name: says(tokenizer, answer) for name, answer in answers.items()}
    generator, engine = make_generator(lambda submission, i: rules[submission.request_id](submission, i))
    deltas = collect(generator, n=3, seed=5)
    assert [text_of(deltas, index) for index in range(3)] == list(answers.values())
    assert [sum(d.finish_reason is not None for d in deltas if d.index == i) for i in range(3)] == [1, 1, 1]
    assert {delta.index for delta in deltas[:3]} == {0, 1, 2}
    assert deltas[-1].index == 0  # the longest
    assert len({submission.seed for submission in engine.submitted}) == 3


def test_a_stop_string_in_one_completion_leaves_the_others_alone():
    tokenizer = byte_level_tokenizer()
    rules = {"r-0": says(tokenizer, "stop here"), "r-1": says(tokenizer, ANSWER)}
    generator, engine = make_generator(lambda submission, i: rules[submission.request_id](submission, i))
    deltas = collect(generator, n=2, stop=("here",))
    assert (text_of(deltas, 0), text_of(deltas, 1)) == ("stop ", ANSWER)
    assert engine.cancelled == ["r-0"]


@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_stream_cancels_every_completion(n):
    generator, engine = make_generator()

    async def leave_early():
        async with aclosing(generator.stream("r", [1], SamplingParams(n=n, max_tokens=40))) as stream:
            async for _ in stream:
                break
        return set(engine.running)

    assert asyncio.run(leave_early()) == set()
    assert sorted(engine.cancelled) == [f"r-{index}" for index in range(n)]


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_the_reader_cancels_every_completion(n):
    generator, engine = make_generator(delay_s=3600.0)

    async def cancel():
        async def read():
            async for _ in generator.stream("r", [1], SamplingParams(n=n)):
                pass

        reader = asyncio.create_task(read())
        while len(engine.running) < n:
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(cancel())
    assert sorted(engine.cancelled) == [f"r-{index}" for index in range(n)]
    assert engine.running == set()


def test_a_failed_sequence_ends_with_an_error_delta():
    generator, _ = make_generator(error_after=2)
    deltas = collect(generator)
    assert len(deltas) == 3
    assert (deltas[-1].finish_reason, deltas[-1].error) == (FinishReason.ERROR, "bad logits")


@pytest.mark.parametrize("n", [1, 2])
def test_a_dead_engine_is_an_exception(n):
    generator, engine = make_generator(fail_after=1)
    with pytest.raises(EngineError, match="died"):
        collect(generator, n=n)
    assert engine.running == set()


def test_logprobs_of_prompt_and_output():
    generator, _ = make_generator()
    deltas = collect(generator, n=2, logprobs=2, prompt_logprobs=0)
    with_prompt = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert [(delta.index, len(delta.prompt_logprobs)) for delta in with_prompt] == [(0, 2)]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert all(len(token.top) == 2 for delta in deltas for token in delta.logprobs)


# Merging


def test_merge_closes_all_streams_when_one_fails():
    closed = []

    async def endless(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def failing():
        yield "last words"
        raise ValueError("broken")

    items = []

    async def read():
        async for item in merge([endless("a"), failing(), endless("b")]):
            items.append(item)  # noqa: PERF401 - what came before the exception counts

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
    assert (1, "last words") in items
    assert sorted(closed) == ["a", "b"]


def test_merge_of_nothing_is_empty():
    async def read():
        return [item async for item in merge([])]

    assert asyncio.run(read()) == []


class SlowChecker:
    """Checks grammars that are called slow when it may."""

    def __init__(self) -> None:
        self.may_end, self.checked = Event(), []

    def known(self, lark, users):
        return "known" if lark == "known" else None

    def check(self, lark, users):
        if lark.startswith("slow"):
            assert self.may_end.wait(60)
        self.checked.append(lark)
        return lark

    def close(self) -> None:
        pass


def test_one_clients_grammars_do_not_hold_up_anothers():
    async def ask():
        generator, _ = make_generator()
        generator._checker = checker = SlowChecker()

        def start(name, client):
            return asyncio.create_task(generator.checked(lambda: name, client=client))

        slow = [start(f"slow {i}", "a") for i in range(MAX_CHECKS_WAITING + 1)]
        while "a" not in (clients := generator._check_turns._clients) or len(clients["a"].work) <= MAX_CHECKS_WAITING:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFullError):
            await start("one more", "a")
        assert await start("quick", "b") == "quick"
        assert await start("quick", None) == "quick"
        assert await start("known", "b") == "known"
        assert checker.checked == ["quick", "quick"]
        checker.may_end.set()
        assert await asyncio.gather(*slow) == [f"slow {i}" for i in range(MAX_CHECKS_WAITING + 1)]
        generator.close()

    asyncio.run(ask())

"""Stored responses: conversations that continue by id, their input, deletion, age and space."""

from __future__ import annotations

import threading

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.server.api.responses.response_items import ReasoningItem
from moeflow.server.guard.strict_json import MAX_CONTAINERS
from moeflow.server.response_store import ResponseStore
from tests.server.conversing import ONE, prompt_of
from tests.server.fake_client import NAME, REPLY
from tests.server.openai_objects import check
from tests.server.responses.asking import TOOLS, ask, streamed, without_ids
from tests.server.test_tools import says
from tests.tiny_mixtral import EOS


def test_a_conversation_by_id(client, engine, tokenizer):
    says(engine, tokenizer, ONE)
    first = ask(client, tools=TOOLS, instructions="Be brief.")
    assert client.responses.retrieve(first.id) == first
    (call,) = first.output
    says(engine, tokenizer, "Brown.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is brown."}
    second = ask(client, input=[result], tools=TOOLS, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third, _ = streamed(client, input="And now?", previous_response_id=second.id)
    prompt = prompt_of(engine, tokenizer)
    places = [prompt.index(text) for text in ("Which fox?", ONE, "It is brown.", "Brown.", "And now?")]
    assert places == sorted(places)
    assert "Be brief." not in prompt, "instructions are those of one response"
    assert without_ids(client.responses.retrieve(third.id)) == without_ids(third)


def test_by_id_is_as_by_items(thinking):
    client, engine, tokenizer = thinking
    engine.reply = [*tokenizer.encode("<think>Hm.</think>A fox.", add_special_tokens=False), EOS]
    first = ask(client)
    ask(client, input="Go on.", previous_response_id=first.id)
    by_id = engine.submissions[-1].prompt_token_ids
    ask(client, input=[{"role": "user", "content": "Which fox?"}, *first.output, {"role": "user", "content": "Go on."}])
    assert engine.submissions[-1].prompt_token_ids == by_id


def test_what_went_in(client, engine, tokenizer):
    items = [
        {"role": "developer", "content": "Rules."},
        {
            "id": "msg_1",
            "role": "user",
            "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "C"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "D"}]},
    ]
    answer = ask(client, input=items)
    listed = list(client.responses.input_items.list(answer.id, order="asc", limit=2))
    for item in listed:
        check(item)
    assert [item.type for item in listed] == [
        "message",
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert [part.text for part in listed[1].content] == ["A", "B"]
    assert (listed[1].id, listed[2].id, listed[5].output) == ("msg_1", "rs_1", "D")
    assert len({item.id for item in listed}) == 6
    assert [item.id for item in client.responses.input_items.list(answer.id)] == [item.id for item in listed[::-1]]
    (page,) = client.responses.input_items.list(answer.id, limit=100).iter_pages()
    assert page.object == "list"
    assert not page.has_more


def test_counts_are_those_of_prompts(client, engine):
    first = ask(client)
    given = {"input": "And now?", "instructions": "Be brief.", "tools": TOOLS, "previous_response_id": first.id}
    count = client.responses.input_tokens.count(model=NAME, **given)
    check(count)
    ask(client, **given)
    assert count.input_tokens == len(engine.submissions[-1].prompt_token_ids)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.input_tokens.count(model=NAME, input="x", previous_response_id="resp_none")
    with pytest.raises(openai.BadRequestError, match="personality"):
        client.responses.input_tokens.count(model=NAME, input="x", personality="friendly")


@pytest.mark.parametrize("max_output_tokens", [None, 20])
def test_a_stream_is_told_again(thinking, max_output_tokens):
    """With the same events, but that each text is in one piece; also from the middle."""
    client, engine, tokenizer = thinking
    text = '<think>Hm.</think>A fox.[TOOL_CALLS]look[ARGS]{"q": "fox"}[TOOL_CALLS]go[ARGS]{}'
    engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    given = {"tools": TOOLS, "top_logprobs": 1, "max_output_tokens": max_output_tokens}
    events = list(ask(client, **given, stream=True))
    again = list(
        client.responses.retrieve(events[-1].response.id, stream=True, include=["message.output_text.logprobs"])
    )
    for event in again:
        check(event)
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert told(again) == told(events)
    assert list(client.responses.retrieve(events[-1].response.id, stream=True, starting_after=5)) == again[6:]
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response


def told(events) -> list:
    """The content of events, without their numbers; pieces of one text joined."""
    found: list = []
    for event in events:
        fields = event.model_dump(exclude={"sequence_number"})
        is_more = "delta" in fields and found and found[-1]["type"] == fields["type"]
        if is_more:
            found[-1]["delta"] += fields["delta"]
            if "logprobs" in fields:
                found[-1]["logprobs"] += fields["logprobs"]
        else:
            found.append(fields)
    return found


def tiny_reasoning(count: int) -> list[dict]:
    return [{"role": "user", "content": "Hi."}, *[{"type": "reasoning", "summary": []}] * count]


def test_a_history_is_bounded_as_a_body_is(client, engine):
    """Each link passes the bound on values of one body. A longer chain is refused before it is decoded."""
    half = MAX_CONTAINERS // 2 // len(("item", "summary", "content")) - 10
    first = ask(client, input=tiny_reasoning(half))
    second = ask(client, input=tiny_reasoning(half), previous_response_id=first.id)
    third = ask(client, input=tiny_reasoning(half), previous_response_id=second.id)
    num_submissions = len(engine.submissions)
    for use in (
        lambda: ask(client, input="And now?", previous_response_id=third.id),
        lambda: client.responses.input_tokens.count(model=NAME, input="x", previous_response_id=third.id),
    ):
        with pytest.raises(openai.BadRequestError, match=r"lists and objects; one request reads at most") as caught:
            use()
        assert (caught.value.code, caught.value.param) == ("history_too_large", "previous_response_id")
    assert len(engine.submissions) == num_submissions
    assert ask(client, input="And now?", previous_response_id=second.id).output_text == REPLY


def test_the_bytes_of_a_history_are_bounded_as_those_of_a_body(client, app):
    text = "x" * (app.state.service.config.max_body_bytes // 2)
    long = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    first = ask(client, input=[{"role": "user", "content": "Hi."}, long])
    second = ask(client, input=[{"role": "user", "content": "Hi."}, long], previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match=r"bytes and 28 lists and objects"):
        ask(client, input="And now?", previous_response_id=second.id)


def test_tools_of_each_turn_do_not_count(client, app):
    """Agents send the same tools with each turn. A history is its items."""
    answer = ask(client, tools=TOOLS)
    for _ in range(3):
        answer = ask(client, tools=TOOLS, previous_response_id=answer.id)
    history = app.state.service.responses.history(answer.id)
    assert b"parameters" not in b"".join(history.lists)


def test_large_conversations_are_read_off_the_event_loop(client, monkeypatch):
    threads = {}
    for name, function in (("stored", ReasoningItem.stored), ("add_to", ReasoningItem.add_to)):

        def traced(self, *args, name=name, function=function):
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(self, *args)

        monkeypatch.setattr(ReasoningItem, name, traced)
    first = ask(client, input=tiny_reasoning(2000))
    ask(client, input="And now?", previous_response_id=first.id)
    assert threads["stored"].isdisjoint(threads["add_to"])


def test_deletion(client):
    answer = ask(client)
    assert client.responses.delete(answer.id) is None
    for use in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: client.responses.input_items.list(answer.id),
        lambda: ask(client, previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match=answer.id):
            use()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_stored(client, app, stream):
    answer = ask(client, store=False, stream=stream)
    if stream:
        *_, last = answer
        answer = last.response
    assert app.state.service.responses.num_bytes == 0
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_failure_is_not_stored(client, engine, app):
    engine.fail_after = 2
    list(ask(client, stream=True))
    with pytest.raises(openai.InternalServerError):
        ask(client)
    assert app.state.service.responses.num_bytes == 0


def test_a_response_that_was_cut_off_can_be_followed(client):
    first = ask(client, max_output_tokens=5)
    assert first.status == "incomplete"
    assert ask(client, previous_response_id=first.id).output_text == REPLY
    assert client.responses.retrieve(first.id).model == NAME


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response(name: str, size: int = 0) -> dict:
    return {"id": name, "output": [{"text": "x" * size}]}


def test_age():
    clock = Clock()
    store = ResponseStore(lifetime_s=10, clock=clock)
    store.put(response("a"), b"[]", None)
    store.put(response("b"), b"[]", "a")
    clock.now_s = 9
    assert store.history("b") is not None, "which is a use of both"
    clock.now_s = 18
    assert store.response("a") is not None
    clock.now_s = 27
    assert store.response("b") is None
    assert store.history("b") is None
    assert store.response("a") is not None
    clock.now_s = 40
    assert store.response("a") is None
    assert store.num_bytes == 0


def test_room_is_made_by_what_was_not_used_for_longest():
    store = ResponseStore(max_bytes=20_000)
    for name in "abc":
        store.put(response(name, 2000), b"[]", "a" if name == "b" else None)
    assert store.history("b") is not None
    store.put(response("d", 2000), b"[]", None)
    assert [store.response(name) is not None for name in "abcd"] == [True, True, False, True]
    store.put(response("large", 10_000), b"[]", None)
    assert store.response("large") is None
    assert store.response("d") is not None, "what is too large makes no room"


def test_a_broken_conversation_is_none():
    store = ResponseStore()
    store.put(response("a"), b'[{"n": 1}]', None)
    store.put(response("b"), b'[{"n": 2}]', "a")
    history = store.history("b")
    assert history.items() == [{"n": 1}, {"text": ""}, {"n": 2}, {"text": ""}]
    assert history.num_containers == 2 * len(("input", "an item", "output", "an item"))
    assert history.num_bytes == 2 * len('[{"n":1}][{"text":""}]') + 2
    assert store.delete("a")
    assert not store.delete("a")
    assert store.history("b") is None
    assert store.items("b") == [{"n": 2}]


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "use", "delete", "wait"]), st.sampled_from("abcdef"), st.integers(0, 1500)),
        max_size=30,
    )
)
def test_bytes_are_counted_and_bounded(steps):
    clock = Clock()
    store = ResponseStore(max_bytes=6000, lifetime_s=1000, clock=clock)
    put: dict[str, int] = {}
    for number, (kind, name, size) in enumerate(steps):
        if kind == "put":
            put[f"{name}{number}"] = size
            store.put(response(f"{name}{number}", size), b"[]", None)
        elif kind == "wait":
            clock.now_s += size
        else:
            for known in [known for known in put if known.startswith(name)]:
                store.delete(known) if kind == "delete" else store.response(known)
        assert store.num_bytes <= 6000
    kept = [name for name in put if store.response(name) is not None]
    assert (store.num_bytes == 0) == (not kept)
    assert store.num_bytes >= sum(put[name] for name in kept)

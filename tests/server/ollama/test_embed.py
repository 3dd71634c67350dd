"""`/api/embed` and `/api/embeddings`, as Ollama's client uses them, and what happens to a text that is too long."""

from __future__ import annotations

import ollama
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.engine.admission import cut_prompt
from tests.server.fake_client import NAME


def openai_vectors(client: ollama.Client, texts: list[str]) -> list[list[float]]:
    answer = client._client.post("/v1/embeddings", json={"model": NAME, "input": texts}).json()
    return [each["embedding"] for each in answer["data"]]


def test_vectors_are_those_of_the_other_api(client):
    texts = ["one", "two"]
    answer = client.embed(NAME, texts)
    assert [list(vector) for vector in answer.embeddings] == openai_vectors(client, texts)
    assert (answer.model, answer.prompt_eval_count) == (NAME, 6)
    assert answer.total_duration >= answer.load_duration > 0
    assert list(client.embeddings(NAME, "one").embedding) == openai_vectors(client, ["one"])[0]
    assert [len(vector) for vector in client.embed(NAME, "one", dimensions=2).embeddings] == [2]


def test_no_text_has_no_vector(client, engine):
    assert list(client.embed(NAME, "").embeddings) == list(client.embed(NAME, []).embeddings) == []
    assert list(client.embeddings(NAME, "").embedding) == []
    assert not engine.submissions


def test_a_text_that_is_too_long_is_cut_unless_the_client_forbids_it(client, engine, tokenizer):
    text = "".join(map(str, range(3000)))
    assert client.embed(NAME, text).prompt_eval_count == 4095
    assert engine.submissions[0].prompt_token_ids == tokenizer.encode(text)[:4095]
    client.embeddings(NAME, text)
    assert engine.submissions[1].prompt_token_ids == engine.submissions[0].prompt_token_ids
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(NAME, text, truncate=False)


@given(length=st.integers(1, 12), room=st.integers(1, 12), ends_special=st.booleans())
def test_a_special_token_at_the_end_stays_there(length, room, ends_special):
    class Known:
        special_token_ids = frozenset([99])

    token_ids = [*range(length - 1), 99 if ends_special else length]
    cut = cut_prompt(Known(), token_ids, room)
    assert len(cut) == min(length, room)
    if length <= room:
        assert cut == token_ids
    elif ends_special and room > 1:
        assert cut == [*range(room - 1), 99]
    else:
        assert cut == [*range(room)]


@pytest.mark.parametrize("call", ["embed", "embeddings"])
def test_refusals(client, engine, call):
    with pytest.raises(ollama.ResponseError, match="model 'zz' not found") as caught:
        getattr(client, call)("zz", "x")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="must be a string, or a list"):
        client.embed(NAME, ["", "x"])
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed(NAME, "x", dimensions=10**6)
    assert not engine.submissions

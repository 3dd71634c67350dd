"""`/v1/embeddings`: the form of answers, by the official client too, and refused requests."""

from __future__ import annotations

import base64
import struct

import msgspec
import openai
import pytest

from moeflow.core.pooling_params import PoolingParams
from tests.server.conversing import openai_client
from tests.server.fake_client import NAME

pytestmark = pytest.mark.anyio


async def ask(http, **body):
    return await http.post("/v1/embeddings", json={"input": "Hello", **body})


async def test_vectors_of_several_texts_in_order(http, engine):
    response = await ask(http, input=["Hello", "Hi"])
    assert response.status_code == 200, response.text
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [5.0, 0.5, -2.0, 0.25]},
            {"object": "embedding", "index": 1, "embedding": [2.0, 0.5, -2.0, 0.25]},
        ],
        "model": NAME,
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert all(submission.pooling == PoolingParams() for submission in engine.submissions)


@pytest.mark.parametrize(("given", "lengths"), [([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2]), ("Hi", [2])])
async def test_inputs_in_all_forms(http, given, lengths):
    response = await ask(http, input=given)
    assert [item["embedding"][0] for item in response.json()["data"]] == lengths


async def test_base64_and_dimensions(http, engine):
    response = await ask(http, encoding_format="base64", dimensions=3, pooling="mean")
    (item,) = response.json()["data"]
    assert struct.unpack("<3f", base64.b64decode(item["embedding"])) == (5.0, 0.5, -2.0)
    assert engine.submissions[0].pooling == PoolingParams(kind="mean", dimensions=3)


def test_the_official_client(app):
    with openai_client(app) as client:
        answer = client.embeddings.create(model=NAME, input=["Hello", "Hi"])
        assert [item.embedding for item in answer.data] == [[5.0, 0.5, -2.0, 0.25], [2.0, 0.5, -2.0, 0.25]]
        assert answer.usage.total_tokens == 7
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=NAME, input="Hello", dimensions=5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"temperature": 1}, "temperature"),
        ({"input": "a" * 300}, "prompt"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_its_field(http, body, param):
    response = await ask(http, **body)
    assert response.status_code == 400
    assert param in response.json()["error"]["param"]


async def test_a_pooling_that_is_not_supported_has_to_be_named(http, engine):
    engine.model = msgspec.structs.replace(engine.model, pooling=None)
    response = await ask(http)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "pooling")
    assert (await ask(http, pooling="last")).status_code == 200


async def test_an_engine_that_fails_is_said_to(http, engine):
    engine.cancel_all = True
    response = await ask(http)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cancelled")
    assert not engine.live

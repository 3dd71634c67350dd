"""`/classify`: the form of answers and refused requests; and requests for text from an encoder."""

from __future__ import annotations

import msgspec
import pytest

from moeflow.core.pooling_params import PoolingParams
from tests.server.fake_client import NAME

pytestmark = pytest.mark.anyio


@pytest.fixture
def classes(engine):
    engine.model = msgspec.structs.replace(engine.model, labels=("bad", "fair", "good", "best"), num_layers=0)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_the_classes_of_several_texts_in_order(http, engine, classes, path):
    response = await http.post(path, json={"model": NAME, "input": ["Hello", "Hi"]})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": NAME,
        "data": [
            {"index": 0, "label": "bad", "probs": [5.0, 0.5, -2.0, 0.25], "num_classes": 4},
            {"index": 1, "label": "bad", "probs": [2.0, 0.5, -2.0, 0.25], "num_classes": 4},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert {it.pooling for it in engine.submissions} == {PoolingParams(kind="mean", normalize=False, classifies=True)}


@pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": "Hello", "dimensions": 3}])
async def test_malformed_requests(http, engine, classes, body):
    response = await http.post("/classify", json=body)
    assert response.status_code == 400, response.text
    assert not engine.submissions


async def test_a_model_without_classes(http, engine):
    response = await http.post("/classify", json={"input": "Hello"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "no_classes"
    assert "does not sort texts into classes" in response.json()["error"]["message"]
    assert not engine.submissions


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/completions", {"prompt": "Hello", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_text_of_an_encoder(http, engine, classes, path, body):
    response = await http.post(path, json={"model": NAME, **body})
    assert response.status_code == 400, response.text
    assert "ask for its vectors (/v1/embeddings) or its classes (/classify)" in response.json()["error"]["message"]
    assert not engine.submissions

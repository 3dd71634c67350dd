"""`/rerank` and `/score`: cosines as torch computes them, the form of answers, and refusals."""

from __future__ import annotations

import httpx
import msgspec
import pytest
import torch
from transformers import AutoTokenizer

from moeflow.core.pooling_params import PoolingParams
from tests.server.fake_client import NAME
from tests.server.server_process import Server
from tests.tiny_switch import write_tiny_encoder

pytestmark = pytest.mark.anyio

QUERY = "Which fox?"
DOCUMENTS = ["a", "a red fox", "the brown fox", "a", QUERY]


def cosine(*texts):
    """Of the vectors that the fake engine makes of two texts, where a byte is a token."""
    first, second = (torch.tensor([float(len(text)), 0.5, -2.0, 0.25], dtype=torch.float64) for text in texts)
    return torch.nn.functional.cosine_similarity(first, second, dim=0).item()


async def ask(http, path="/v1/rerank", status=200, **body):
    body = {"query": QUERY, "documents": DOCUMENTS, **body} if "rerank" in path else body
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_the_cosine(http, engine, path):
    answer = await ask(http, path, model=NAME)
    expected = sorted(((cosine(QUERY, text), -place) for place, text in enumerate(DOCUMENTS)), reverse=True)
    assert [result["index"] for result in answer["results"]] == [-place for _, place in expected]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([it for it, _ in expected])
    assert answer["results"][0]["relevance_score"] == pytest.approx(1)
    assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[-place] for _, place in expected]
    assert answer["id"].startswith("rerank-")
    assert answer["model"] == NAME
    num_tokens = sum(map(len, {QUERY, *DOCUMENTS}))  # each text once
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert len(engine.submissions) == len({QUERY, *DOCUMENTS})
    assert {submission.pooling for submission in engine.submissions} == {PoolingParams()}


@pytest.mark.parametrize(("top_n", "count"), [(None, 5), (0, 5), (2, 2), (9, 5)])
async def test_the_best_documents(http, top_n, count):
    found = (await ask(http, top_n=top_n))["results"]
    assert found == (await ask(http))["results"][:count]


async def test_documents_as_objects_and_answers_without_texts(http):
    answer = await ask(http, documents=[{"text": text} for text in DOCUMENTS], return_documents=False)
    whole = await ask(http)
    assert answer["results"] == [
        {"index": result["index"], "relevance_score": result["relevance_score"]} for result in whole["results"]
    ]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "bcd"), ("a", ["bcd", "efghi"]), (["a"], ["bcd", "efghi"]), (["a", "bcd"], ["efghi", "a"])],
)
async def test_scores_of_pairs(http, path, first, second):
    answer = await ask(http, path, text_1=first, text_2=second)
    first, second = ([it] if isinstance(it, str) else it for it in (first, second))
    pairs = zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)
    assert answer["object"] == "list"
    assert [item["object"] for item in answer["data"]] == ["score"] * len(second)
    assert [item["index"] for item in answer["data"]] == [*range(len(second))]
    assert [item["score"] for item in answer["data"]] == pytest.approx([cosine(*pair) for pair in pairs])


async def test_scores_are_cosines_also_after_rounding(http):
    texts = ["a" * length for length in range(1, 50)]
    answer = (await http.post("/v1/score", json={"text_1": texts, "text_2": texts})).json()
    assert all(0.999 < item["score"] <= 1 for item in answer["data"])


async def test_another_pooling(http, engine):
    await ask(http, pooling="mean")
    assert {submission.pooling.kind for submission in engine.submissions} == {"mean"}


async def test_a_model_of_classes_has_no_scores(http, engine):
    engine.model = msgspec.structs.replace(engine.model, labels=("bad", "good"), num_layers=0)
    for path, body in (("/v1/rerank", {}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        error = (await ask(http, path, 404, **body))["error"]
        assert error["code"] == "no_scores"
        assert "ask a model of embeddings" in error["message"]
    assert not engine.submissions


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": [""]}, r"documents[0]: must be a text or an object with a text"),
        ("/v1/rerank", {"documents": [{"txet": "a"}]}, "unknown field 'txet'"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["a"] * 1001}, "documents: List should have at most 1000 items"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts and text_2 1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "a"}, "give as many, or one text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b" * 300}, "maximum context length is 256"),
    ],
)
async def test_malformed_requests(http, engine, path, body, reason):
    assert reason in (await ask(http, path, 400, **body))["error"]["message"]
    assert not engine.submissions


@pytest.mark.thorough  # a server process; vectors and cosines each have an oracle of their own
def test_scores_of_an_encoder_are_those_of_transformers(tmp_path):
    theirs = write_tiny_encoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def vector(text):
        with torch.no_grad():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            return theirs(input_ids=ids).last_hidden_state[0].mean(0)

    server = Server(tmp_path)
    try:
        url = server.wait_until_ready().url
        body = {"query": QUERY, "documents": DOCUMENTS[:3]}
        results = httpx.post(f"{url}/rerank", json=body, timeout=60).json()["results"]
    finally:
        server.process.terminate()
        server.process.communicate(timeout=60)
    asked = vector(QUERY)
    expected = [torch.cosine_similarity(asked, vector(text), dim=0).item() for text in DOCUMENTS[:3]]
    assert {it["index"]: it["relevance_score"] for it in results} == pytest.approx(dict(enumerate(expected)), abs=1e-4)
    assert len({round(score, 3) for score in expected}) == 3

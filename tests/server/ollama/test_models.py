"""What clients of Ollama and LM Studio learn of the models, and which requests they may not make."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

import msgspec
import ollama
import pytest

from moeflow.core.token_choice import TokenChoice
from moeflow.engine.generator import Generator
from moeflow.server.api.model_facts import ModelFacts, model_facts
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.served_model import ModelSource, ServedModel
from tests.server.conftest import connect
from tests.server.fake_client import NAME, REPLY, FakeClient
from tests.server.fleet import make_fleet
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture
def folder(tmp_path):
    """A model's folder, as far as facts look at it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "more").mkdir()
    return tmp_path


@pytest.fixture
def engine(tokenizer, folder) -> FakeClient:
    engine = FakeClient(tokenizer, max_model_len=4096)
    engine.model = msgspec.structs.replace(
        engine.model,
        path=str(folder),
        model_type="mixtral",
        num_parameters=46_700_000_000,
        num_experts=8,
        sampling_defaults=TokenChoice(temperature=0.25, repetition_penalty=1.5),
        weight_format="int4",
    )
    return engine


def test_the_models(client, folder):
    (model,) = client.list().models
    assert model.model == f"{NAME}:latest"
    assert (model.size, len(model.digest)) == (1002, 64)
    newest = max(file.stat().st_mtime for file in folder.iterdir() if file.is_file())
    assert model.modified_at == datetime.fromtimestamp(newest, UTC)
    details = model.details
    assert (details.format, details.family, list(details.families)) == ("safetensors", "mixtral", ["mixtral"])
    assert (details.parameter_size, details.quantization_level) == ("46.7B", "INT4")
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest, loaded.details) == (model.model, model.digest, details)
    assert (loaded.size, loaded.size_vram, loaded.context_length) == (1002, 0, 4096)
    assert loaded.expires_at.astimezone() > datetime.now(UTC)
    (folder / "model.safetensors").write_bytes(b"y" * 1001)
    assert client.list().models[0].digest != model.digest


def test_a_model_in_detail(client):
    for name in (NAME, f"{NAME}:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo["general.architecture"] == "mixtral"
        assert shown.modelinfo["general.parameter_count"] == 46_700_000_000
        assert shown.modelinfo["mixtral.context_length"] == 4096
        assert shown.modelinfo["mixtral.embedding_length"] == 4
        assert shown.modelinfo["mixtral.expert_count"] == 8
        parameters = dict(line.split() for line in shown.parameters.splitlines())
        assert parameters == {"num_ctx": "4096", "temperature": "0.25", "repeat_penalty": "1.5"}
        assert "messages" in shown.template
    with pytest.raises(ollama.ResponseError, match="model 'zz' not found"):
        client.show("zz")
    for name, status in (("zz", 404), (NAME, 200)):
        older = client._client.post("/api/show", json={"model": "", "name": name, "system": "", "options": None})
        assert older.status_code == status


def facts_of(served: ServedModel) -> ModelFacts:
    return asyncio.run(model_facts(served))


def test_a_model_that_is_not_loaded_is_described_by_its_files(tmp_path):
    write_tiny_mixtral(tmp_path, max_position_embeddings=512)
    facts = facts_of(ServedModel(1, ModelSource("m", str(tmp_path), None)))
    assert (facts.architecture, facts.context_length, facts.capabilities) == ("mixtral", 512, ())
    assert facts.metadata["mixtral.context_length"] == 512
    assert facts.metadata["general.parameter_count"] > 1000
    gone = facts_of(ServedModel(1, ModelSource("m", str(tmp_path / "gone"), None)))
    assert (gone.architecture, gone.context_length, gone.metadata, gone.size_bytes) == ("", None, {}, 0)


def test_what_models_can_do(thinking, tokenizer):
    client, _, _ = thinking
    assert client.show(NAME).capabilities == ["completion", "tools", "thinking"]
    engine = FakeClient(tokenizer)
    engine.model = msgspec.structs.replace(engine.model, num_layers=0, name="encoder")
    served = ServedModel(1)
    served.attach(Generator(engine, tokenizer))
    assert facts_of(served).capabilities == ("embedding",)


def test_the_parts_of_a_gguf_model_are_one(tmp_path):
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"x" * 10)
    facts = facts_of(ServedModel(1, ModelSource("m", str(tmp_path / "big-00001-of-00002.gguf"), None)))
    assert (facts.file_format, facts.size_bytes) == ("gguf", 20)
    assert facts_of(ServedModel(1, ModelSource("o", str(tmp_path / "other.gguf"), None))).size_bytes == 10


@pytest.mark.parametrize(("count", "text"), [(8_030_261_248, "8.0B"), (134_515_008, "134.5M"), (1000, "1.0K")])
def test_the_number_of_parameters_in_short(tokenizer, count, text):
    engine = FakeClient(tokenizer)
    engine.model = msgspec.structs.replace(engine.model, num_parameters=count)
    served = ServedModel(1)
    served.attach(Generator(engine, tokenizer))
    assert facts_of(served).parameter_size == text


@pytest.mark.anyio
async def test_versions_and_probes(http):
    answer = await http.get("/api/version")
    major, minor, _ = map(int, answer.json()["version"].split("."))
    assert (major, minor) >= (0, 14)  # Codex wants 0.13.4, Copilot 0.6.4
    for path in ("/", "/api/version", "/api/tags"):
        assert (await http.head(path)).status_code == 200
    assert "Ollama is running" in (await http.get("/")).text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", f"/api/{verb}") for verb in ("push", "create", "copy", "blobs/sha256:0")),
        ("DELETE", "/api/delete"),
    ],
)
async def test_models_are_not_changed(http, method, path):
    answer = await http.request(method, path, json={"model": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("this server ")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api/nothing", 404), ("GET", "/api/chat", 405), ("GET", "/api/v0/models/zz", 404)],
)
async def test_every_error_is_in_ollamas_words(http, method, path, status):
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert [*answer.json()] == ["error"]
    assert isinstance(answer.json()["error"], str)


@pytest.mark.anyio
async def test_before_the_model_is_loaded():
    async with connect(create_app(None, ServerConfig())) as http:
        assert (await http.get("/api/ps")).json() == {"models": []}
        for path in ("/api/tags", "/api/v0/models"):
            answer = await http.get(path)
            assert (answer.status_code, "is being loaded" in answer.json()["error"]) == (503, True)


@pytest.mark.anyio
async def test_several_models_are_loaded_and_unloaded_on_demand(tokenizer):
    fleet = make_fleet(tokenizer)
    async with connect(fleet.app) as http:

        async def ask(model, **more):
            return (await http.post("/api/generate", json={"model": model, "stream": False, **more})).json()

        listed = (await http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in listed] == [f"{name}:latest" for name in ("a", "b", "c", "huge")]
        assert (await http.get("/api/ps")).json()["models"] == []
        shown = (await http.post("/api/show", json={"name": "b"})).json()
        assert (shown["model_info"], shown["capabilities"], fleet.history) == ({}, [], [])
        assert (await ask("b:latest"))["done_reason"] == "load"
        (loaded,) = (await http.get("/api/ps")).json()["models"]
        assert (loaded["name"], loaded["size"]) == ("b:latest", 50)
        states = (await http.get("/api/v0/models")).json()["data"]
        assert [model["state"] for model in states] == ["not-loaded", "loaded", "not-loaded", "not-loaded"]
        assert (await ask("b", prompt="x", raw=True))["response"] == REPLY
        assert (await ask("b", keep_alive=0))["done_reason"] == "unload"
        assert fleet.status["b"] == "unloaded"
        assert (await ask("b", keep_alive=0))["done_reason"] == "unload"  # again is harmless
        assert (await ask("a:latest", prompt="x"))["response"] == REPLY
        answer = await http.post("/v1/completions", json={"model": "a:latest", "prompt": "x"})
        assert answer.json()["model"] == "a"


@pytest.mark.anyio
async def test_what_is_in_use_is_not_unloaded(tokenizer):
    fleet = make_fleet(tokenizer)
    async with connect(fleet.app) as http:
        await http.post("/api/generate", json={"model": "b"})
        pool = fleet.app.state.service.models
        model = pool.find("b")
        with model.in_use():
            assert (await http.post("/api/generate", json={"model": "b", "keep_alive": 0})).status_code == 200
            assert fleet.status["b"] == "ready"


@pytest.mark.anyio
async def test_lm_studios_list(http):
    (model,) = (await http.get("/api/v0/models")).json()["data"]
    assert model == {
        "id": NAME,
        "object": "model",
        "type": "llm",
        "publisher": "moeflow",
        "arch": "mixtral",
        "compatibility_type": "safetensors",
        "quantization": "INT4",
        "state": "loaded",
        "max_context_length": 4096,
    }
    assert (await http.get(f"/api/v0/models/{NAME}")).json() == model


@pytest.mark.anyio
async def test_a_name_with_a_tag_keeps_it(tokenizer):
    engine = FakeClient(tokenizer)
    engine.model = msgspec.structs.replace(engine.model, name="org/big:Q4_K_M")
    async with connect(create_app(Generator(engine, tokenizer), ServerConfig())) as http:
        assert (await http.get("/api/tags")).json()["models"][0]["name"] == "org/big:Q4_K_M"
        assert (await http.post("/api/show", json={"model": "org/big:Q4_K_M"})).status_code == 200
        assert (await http.post("/api/show", json={"model": "org/big"})).status_code == 404
        assert "secret" not in json.dumps((await http.post("/api/show", json={})).json())

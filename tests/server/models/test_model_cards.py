"""`/v1/models`: sizes of loaded and unloaded models, by the names that clients read."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from safetensors import safe_open

from moeflow.server import served_model
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.model_pool import ModelPool
from moeflow.server.served_model import ModelSource
from tests.server.conftest import connect
from tests.server.fake_client import NAME
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.anyio

UNKNOWN = dict.fromkeys(("n_ctx", "n_ctx_train", "n_params", "size", "n_vocab", "vocab_size"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny models; one is damaged."""
    folder = tmp_path_factory.mktemp("cards")
    for name in ("good", "damaged"):
        write_tiny_mixtral(folder / name)
    (folder / "damaged" / "config.json").write_text("{")
    return folder


def app_of(folder, names, **settings):
    sources = [
        ModelSource(name, str(folder / name), lambda: pytest.fail("it was loaded"), **settings) for name in names
    ]
    return create_app(None, ServerConfig(), pool=ModelPool(sources, max_queue=4, budget_bytes=100))


async def cards(app):
    async with connect(app) as http:
        return {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}


def stored(folder):
    """Values and bytes of all matrices, and the config, as other libraries read them."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        found = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
    num_values = sum(tensor.numel() for tensor in found if tensor.ndim > 1)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
    return num_values, num_bytes, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("limit", "context"), [(None, 512), (100, 100), (1000, 512)])
async def test_a_model_that_is_not_loaded_is_described_by_its_files(folder, limit, context):
    card = (await cards(app_of(folder, ["good"], max_model_len=limit)))["good"]
    num_values, num_bytes, config = stored(folder / "good")
    assert (card["status"], card["max_model_len"], card["context_length"]) == ("unloaded", context, context)
    assert card["meta"] == {
        "n_ctx": context,
        "n_ctx_train": config["max_position_embeddings"],
        "n_params": num_values,
        "size": num_bytes,
        "n_vocab": config["vocab_size"],
        "vocab_size": config["vocab_size"],
    }


async def test_what_cannot_be_read_is_null_and_the_others_are_listed(folder):
    found = await cards(app_of(folder, ["good", "damaged", "none"]))
    assert found["good"]["max_model_len"] == 512
    for name in ("damaged", "none"):
        assert (found[name]["max_model_len"], found[name]["context_length"]) == (None, None)
        assert found[name]["meta"] == UNKNOWN


async def test_files_are_read_once_and_not_by_the_event_loop(folder, monkeypatch):
    threads = []
    read = served_model.read_file_facts

    def noted(path):
        threads.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(served_model, "read_file_facts", noted)
    app = app_of(folder, ["good", "none"])
    first, second = await asyncio.gather(cards(app), cards(app))
    assert first == second == await cards(app)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_loaded_model_has_the_context_that_is_served(http, engine):
    card = (await http.get(f"/v1/models/{NAME}")).json()
    info = engine.model
    assert (card["max_model_len"], card["context_length"]) == (256, 256)
    assert card["meta"] == {
        **UNKNOWN,  # its files are not there
        "n_ctx": 256,
        "n_params": info.num_parameters,
        "n_vocab": info.vocab_size,
        "vocab_size": info.vocab_size,
    }

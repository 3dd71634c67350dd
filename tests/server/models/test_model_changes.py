"""Load, unload and pull over HTTP: a real hub on loopback, the real process that pulls, and engines that play."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import psutil
import pytest
from fastapi import FastAPI

from moeflow.server.pulls import Pulls, require_model_name
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.patience import PATIENCE_S
from tests.server.conftest import connect
from tests.server.fleet import Fleet, make_fleet
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.anyio
REPO = "tiny/Mixtral"
BIG = "big/Model-GGUF:Q4_K_M"
BIG_BYTES = 3_000_000
RUNNING = ("running",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path, folder):
    cache = tmp_path / "hf" / "hub"
    with hub_of_this_process(monkeypatch, cache) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # for the process that pulls
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.add_folder(REPO, folder)
        hub.add("big/Model-GGUF", {"Model-Q4_K_M.gguf": os.urandom(BIG_BYTES)})
        yield hub


@pytest.fixture
def fleet(tokenizer) -> Fleet:
    return make_fleet(tokenizer, api_key="k")


def keyed(app: FastAPI) -> httpx.AsyncClient:
    client = connect(app)
    client.headers["x-api-key"] = "k"
    return client


async def change(http: httpx.AsyncClient, what: str, model: str, status: int = 200):
    response = await http.post(f"/models/{what}", json={"model": model})
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


async def pull_until(http: httpx.AsyncClient, condition) -> dict:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(pull := (await http.get("/models/pull")).json()["pull"]):
            await asyncio.sleep(0.02)
    return pull


async def end_of_pull(http: httpx.AsyncClient) -> dict:
    return await pull_until(http, lambda pull: pull["state"] not in RUNNING)


def pulling_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [it for it in children if "moeflow.checkpoint.hub.pull_process" in it.cmdline()]


async def test_loading_and_unloading(fleet):
    async with keyed(fleet.app) as http:
        assert await change(http, "load", "b") == {"model": "b", "status": "ready"}
        assert await change(http, "load", "b") == {"model": "b", "status": "ready"}
        assert await change(http, "load", "a:latest") == {"model": "a", "status": "ready"}  # b has to go
        assert await change(http, "unload", "a") == {"model": "a", "status": "unloaded"}
        assert await change(http, "unload", "a") == {"model": "a", "status": "unloaded"}
        for what in ("load", "unload"):
            assert (await change(http, what, "d", 404))["code"] == "model_not_found"
        fleet.problem = "is damaged"
        assert (await change(http, "load", "c", 500))["message"] == "The model 'c' cannot be loaded: c is damaged"
    assert fleet.history[:3] in (["+b", "-b", "+a"], ["+b", "+a", "-b"])


async def test_a_busy_model_is_not_unloaded(fleet):
    fleet.is_paused = True
    async with keyed(fleet.app) as http:
        working = asyncio.create_task(http.post("/v1/completions", json={"model": "a", "prompt": "x"}))
        async with asyncio.timeout(PATIENCE_S):
            while not ("a" in fleet.engines and fleet.engines["a"].live):
                await asyncio.sleep(0.002)
        refused = await change(http, "unload", "a", 409)
        assert (refused["code"], refused["message"]) == (
            "model_busy",
            "a has running requests; try again when that has ended",
        )
        fleet.go_on()
        assert (await working).status_code == 200
        assert (await change(http, "unload", "a"))["status"] == "unloaded"


async def test_a_server_of_one_model_says_how_to_have_several(make_app):
    async with keyed(make_app(api_key="k")) as http:
        for what in ("load", "unload"):
            refused = await change(http, what, "tiny", 409)
            assert (refused["code"], "moeflow serve --model MODEL --model MODEL" in refused["message"]) == (
                "models_fixed",
                True,
            )


async def test_a_pulled_model_can_be_asked_at_once(hub, fleet):
    async with keyed(fleet.app) as http:
        assert (await http.get("/models/pull")).json() == {"pull": None}
        begun = await change(http, "pull", REPO)
        assert (begun["model"], begun["state"]) == (REPO, "running")
        end = await end_of_pull(http)
        assert (end["state"], end["error"], end["done_bytes"]) == ("done", "", end["total_bytes"])
        assert pulling_processes() == []
        local = (await http.get("/models/local")).json()
        (model,) = local["models"]
        size_bytes = sum(len(data) for data in hub.repositories[REPO].files.values())
        assert (model["name"], model["family"], model["problem"]) == (REPO, "mixtral", None)
        assert (model["size_bytes"], local["used_bytes"], model["served_as"]) == (size_bytes, size_bytes, REPO)
        assert local["free_bytes"] > 0
        assert "/hf/hub" not in str(local)  # clients must not see paths
        answer = await http.post("/v1/completions", json={"model": REPO, "prompt": "x", "max_tokens": 2})
        assert (answer.status_code, answer.json()["model"]) == (200, REPO)
        assert (await change(http, "unload", REPO))["status"] == "unloaded"
        assert (await http.get("/models/local")).json()["pull"] == end  # for a page that is loaded again
    assert fleet.history == [f"+{REPO}", f"-{REPO}"]


async def test_what_another_tool_has_pulled_can_be_loaded(hub, fleet, tokenizer):
    async with keyed(fleet.app) as http:
        await change(http, "pull", REPO)
        await end_of_pull(http)
    other = make_fleet(tokenizer, api_key="k")
    async with keyed(other.app) as http:
        assert (await http.get("/models/local")).json()["models"][0]["served_as"] is None
        assert await change(http, "load", REPO) == {"model": REPO, "status": "ready"}
        assert await change(http, "load", f"{REPO}@main") == {"model": REPO, "status": "ready"}
        assert (await http.get("/models/local")).json()["models"][0]["served_as"] == REPO
    assert other.history == [f"+{REPO}"]


async def test_a_server_of_one_model_pulls_too(hub, make_app):
    app = make_app(api_key="k")
    async with keyed(app) as http:
        await change(http, "pull", REPO)
        assert (await end_of_pull(http))["state"] == "done"
        local = (await http.get("/models/local")).json()
        assert [(it["name"], it["served_as"]) for it in local["models"]] == [(REPO, None)]
        assert "moeflow serve --model" in local["load_refusal"]
        assert (await change(http, "load", REPO, 409))["code"] == "models_fixed"


async def test_a_cancelled_pull_keeps_its_bytes_and_goes_on_later(hub, fleet):
    hub.chunk_bytes, hub.wait_s = 50_000, 0.05
    async with keyed(fleet.app) as http:
        await change(http, "pull", BIG)
        pull = await pull_until(http, lambda it: it["done_bytes"] > BIG_BYTES // 10 and it["bytes_per_s"] > 0)
        assert (pull["total_bytes"], pull["state"]) == (BIG_BYTES, "running")
        assert pull["left_s"] == pytest.approx((BIG_BYTES - pull["done_bytes"]) / pull["bytes_per_s"])
        assert (await change(http, "pull", BIG))["state"] == "running"  # the same again
        other = await change(http, "pull", REPO, 409)
        assert (other["code"], other["message"].startswith(BIG)) == ("pull_running", True)

        cancelled = (await http.post("/models/pull/cancel", json={})).json()["pull"]
        assert (cancelled["state"], cancelled["bytes_per_s"]) == ("cancelled", 0)
        assert pulling_processes() == []
        kept = (await http.get("/models/local")).json()["unfinished_bytes"]
        assert kept["big/Model-GGUF"] >= cancelled["done_bytes"] > 0

        hub.wait_s = 0.0
        await change(http, "pull", BIG)
        assert (await end_of_pull(http))["state"] == "done"
        assert int(hub.sent()[-1].range.removeprefix("bytes=").partition("-")[0]) >= cancelled["done_bytes"]
        assert (await http.post("/models/pull/cancel", json={})).json()["pull"]["state"] == "done"


async def test_a_pull_ends_with_its_server(hub):
    """The process ends when its stdin is closed, which the system does for a server that is killed."""
    hub.chunk_bytes, hub.wait_s = 50_000, 0.05
    pulls = Pulls()
    pulls.begin(require_model_name(BIG))
    async with asyncio.timeout(PATIENCE_S):
        while not (pulls.status.done_bytes and pulling_processes()):
            await asyncio.sleep(0.02)
        (process,) = pulling_processes()
        await pulls.cancel()
    assert not process.is_running()


async def test_a_process_that_dies_is_a_failure_that_is_told(hub, fleet):
    hub.chunk_bytes, hub.wait_s = 50_000, 0.05
    async with keyed(fleet.app) as http:
        await change(http, "pull", BIG)
        await pull_until(http, lambda it: it["done_bytes"] > 0)
        (process,) = pulling_processes()
        process.send_signal(signal.SIGKILL)
        end = await end_of_pull(http)
        assert (end["state"], end["error"]) == ("failed", "its process ended early; the server's log has the details")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("o/nothing", "o/nothing"),
        ("big/Model-GGUF:Q9_X", "Q9_X"),
        (f"{REPO}@no-branch", "no-branch"),
    ],
)
async def test_what_the_hub_has_not_is_told(hub, fleet, model, reason):
    async with keyed(fleet.app) as http:
        await change(http, "pull", model)
        end = await end_of_pull(http)
    assert (end["state"], reason in end["error"]) == ("failed", True)


async def test_a_full_disk_is_told_before_anything_is_fetched(hub, fleet):
    hub.nonsense["/api/models/big/Model-GGUF"] = (200, {}, json.dumps(listing_of_a_huge_file()).encode())
    async with keyed(fleet.app) as http:
        await change(http, "pull", BIG)
        end = await end_of_pull(http)
    assert (end["state"], " of disk in " in end["error"]) == ("failed", True)
    assert hub.sent() == []


def listing_of_a_huge_file() -> dict:
    lfs = {"sha256": "a" * 64, "size": 1 << 58, "pointerSize": 130}
    file = {"rfilename": "Model-Q4_K_M.gguf", "size": 1 << 58, "blobId": "b" * 40, "lfs": lfs}
    return {"sha": "c" * 40, "siblings": [file]}


HOSTILE = [
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "o/../m",
    "o/m@../../x",
    "o/m:../../x.gguf",
    "o--x/m",
    "o/m\n",
    "o/m\x00",
    "file:///etc/passwd",
    "http://evil.example/o/m",
    "-o/m",
    "o/m@-x",
    "o/m; rm -rf /",
    "o/" + "m" * 5000,
]


@pytest.mark.parametrize("model", HOSTILE)
async def test_hostile_names_are_refused(hub, fleet, model):
    async with keyed(fleet.app) as http:
        refused = await change(http, "pull", model, 400)
        assert refused["code"] == "invalid_value"
        for what in ("load", "unload"):
            response = await http.post(f"/models/{what}", json={"model": model})
            assert response.status_code in (400, 404)
        ollama = await http.post("/api/pull", json={"model": model})
        assert (ollama.status_code, [*ollama.json()]) == (400, ["error"])
    assert (hub.requests, pulling_processes(), fleet.history) == ([], [], [])


async def test_ollamas_clients_pull(hub, fleet):
    async with keyed(fleet.app) as http:
        answer = await http.post("/api/pull", json={"model": f"hf.co/{BIG}"})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
        progress = [line for line in lines if "total" in line]
        assert progress[-1] == {"status": f"pulling {BIG}", "digest": BIG, "total": BIG_BYTES, "completed": BIG_BYTES}
        assert BIG in [it["name"] for it in (await http.get("/api/tags")).json()["models"]]
        whole = await http.post("/api/pull", json={"name": BIG, "stream": False})
        assert (whole.status_code, whole.json()) == (200, {"status": "success"})
        failed = await http.post("/api/pull", json={"model": "o/nothing"})
        assert [*json.loads(failed.text.splitlines()[-1])] == ["error"]
        failed = await http.post("/api/pull", json={"model": "o/nothing", "stream": False})
        assert (failed.status_code, "o/nothing" in failed.json()["error"]) == (500, True)

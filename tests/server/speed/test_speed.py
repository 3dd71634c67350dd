"""`GET /stats/speed`: measured passes beside roofs and plan. Unknown figures are null, with the reason."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from contextlib import closing

import msgspec
import pytest

from moeflow.core.engine_messages import EngineStats
from moeflow.core.observation import FirstToken, PassGroup, SpeedQuestion, SpeedSight
from moeflow.engine.generator import Generator
from moeflow.kernels.cpu import extension
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.speed.other_programs import OtherPrograms
from moeflow.server.speed.own_processes import own_processes
from moeflow.text.tokenizer import Tokenizer
from tests.server.conftest import connect
from tests.server.real_client import RealClient
from tests.server.speed.planned import FLOPS_PER_S, READ_BYTES_PER_S, planned

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
]
ONE = PassGroup(
    num_tokens=1,
    num_sampled=1,
    num_sequences=1,
    age_s=1.0,
    num_passes=10,
    num_generated=10,
    seconds=0.02,
    num_seen=10 * 40,
    num_read=10 * 40,
    distinct=20.0,
    num_counted=10,
)
FOUR = msgspec.structs.replace(
    ONE, num_tokens=4, num_sampled=4, num_sequences=4, num_generated=40, seconds=0.04, num_seen=1600, num_read=1600
)
PROMPT = PassGroup(
    num_tokens=64,
    num_sampled=1,
    num_sequences=1,
    age_s=0.5,
    num_passes=1,
    num_generated=1,
    seconds=0.004,
    num_seen=64 * 65 // 2,
    num_read=64,
)
FIRST = FirstToken(age_s=3.0, num_prompt_tokens=70, num_computed_tokens=64, seconds=0.005, was_alone=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def served(app, plan, monkeypatch):
    """The application with the plan of its model, and no advice of it."""
    app.state.service.models.only.plan = plan
    monkeypatch.setattr("moeflow.server.speed.advice_run.AdviceRun.ask", lambda self: None)
    return app


async def ask(app):
    async with connect(app) as http:
        answer = await http.get("/stats/speed")
    assert answer.status_code == 200
    return answer.json()


def see(engine, *groups, first_tokens=()):
    engine.sights = {0: SpeedSight(observed_s=30.0, groups=list(groups), first_tokens=list(first_tokens))}


async def test_a_model_without_a_plan_is_unknown(app, engine):
    seen = await ask(app)
    why = "the server knows no plan of this model"
    assert (seen["model"], seen["roofs"], seen["memory"]) == (None, None, None)
    assert seen["trail"] == seen["predicted"] == []
    assert seen["unknown"] == seen["now"]["unknown"] == seen["advice"]["unknown"] == why
    assert engine.questions == [SpeedQuestion()]


async def test_a_model_that_is_not_loaded_is_unknown():
    seen = await ask(create_app(None, ServerConfig()))
    assert seen["unknown"] == "the model is not loaded"


async def test_without_passes_there_is_the_plan_and_reasons_stand_for_the_rest(served, engine, plan):
    see(engine)
    seen = await ask(served)
    assert seen["unknown"] == ""
    assert (seen["now"]["decode"], seen["now"]["prompts"]) == (None, None)
    assert seen["now"]["unknown"] == "no pass in the last minute"
    for row in seen["predicted"][:3]:
        assert (row["measured"], row["expected"], row["error_percent"]) == (None, None, None)
        assert row["unknown"].startswith("no ")
    assert seen["advice"] == {"items": None, "unknown": "worked out once the server is idle"}
    engine.sights = {}
    assert (await ask(served))["now"]["unknown"] == "no engine answers"


async def test_the_plan_is_shown_as_it_was_made(served, engine, plan):
    see(engine)
    seen = await ask(served)
    forecast = plan.forecast
    shown = {row["figure"]: row["planned"] for row in seen["predicted"]}
    for figure, estimate, number in (
        ("alone_tokens_per_s", forecast.decode_alone_tokens_per_s, 1),
        ("full_tokens_per_s", forecast.decode_tokens_per_s, 8),
        ("first_token_s", forecast.time_to_first_token_s, 1),
        ("memory_bytes", next(it.peak_bytes for it in forecast.memory if it.tier == "ram"), 8),
    ):
        assert shown[figure] == {
            **dataclasses.asdict(estimate),
            "num_sequences": number,
            "prompt_len": plan.workload.prompt_len,
            "gen_len": plan.workload.gen_len,
        }
    speeds = {mark["num_sequences"]: mark["tokens_per_s"] for mark in seen["marks"]}
    assert speeds[1] == pytest.approx(forecast.decode_alone_tokens_per_s.value)
    assert speeds[8] == pytest.approx(forecast.decode_tokens_per_s.value)


async def test_roofs_are_those_that_were_measured(served, engine):
    see(engine)
    roofs = (await ask(served))["roofs"]
    assert (roofs["level"], roofs["processor"], roofs["num_devices"]) == ("ram", "cpu", 0)
    assert roofs["memory_bytes_per_s"] == READ_BYTES_PER_S
    assert roofs["disk_bytes_per_s"] == 5e8
    assert roofs["flops_per_s"] == {"float32": FLOPS_PER_S}
    assert roofs["weights_roof"] == "float32"
    assert (roofs["age_s"], roofs["unknown"]) == (None, "")


async def test_points_agree_with_their_parts(served, engine):
    see(engine, ONE, PROMPT, first_tokens=[FIRST])
    seen = await ask(served)
    for point, group in ((seen["now"]["decode"], ONE), (seen["now"]["prompts"], PROMPT)):
        assert point["num_passes"] == group.num_passes
        assert point["pass_s"] == pytest.approx(group.seconds / group.num_passes)
        assert point["intensity"] == pytest.approx(point["flops_per_pass"] / point["bytes_per_pass"])
        assert point["flops_per_s"] == pytest.approx(point["flops_per_pass"] / point["pass_s"])
        assert point["bytes_per_s"] == pytest.approx(point["bytes_per_pass"] / point["pass_s"])
        roof_s = max(point["bytes_per_pass"] / READ_BYTES_PER_S, point["flops_per_pass"] / FLOPS_PER_S)
        assert point["roof_pass_s"] == pytest.approx(roof_s)
        assert point["share_of_roof"] == pytest.approx(roof_s / point["pass_s"])
    assert (seen["now"]["decode"]["distinct_experts"], seen["now"]["prompts"]["distinct_experts"]) == (2.0, None)
    assert seen["now"]["decode"]["generated_per_s"] == pytest.approx(500)
    assert seen["now"]["decode"]["bytes_per_pass"] == pytest.approx(
        seen["model"]["active_bytes_per_token"] + 40 * seen["model"]["kv_bytes_per_token"]
    )
    assert [it["kind"] for it in seen["trail"]] == ["decode", "prompts"]


async def test_measured_figures_are_compared_with_what_the_plan_expects_of_the_same_passes(served, engine, plan):
    see(engine, ONE, FOUR, first_tokens=[FIRST])
    rows = {row["figure"]: row for row in (await ask(served))["predicted"]}
    alone, full, first = (rows[name] for name in ("alone_tokens_per_s", "full_tokens_per_s", "first_token_s"))
    assert (alone["measured"]["value"], alone["measured"]["num_tokens"]) == (pytest.approx(500), 40)
    assert (full["measured"]["value"], full["measured"]["num_sequences"]) == (pytest.approx(1000), 4)
    assert (first["measured"]["value"], first["measured"]["num_tokens"]) == (0.005, 64)
    for row in (alone, full, first):
        assert row["unknown"] == ""
        assert row["error_percent"] == pytest.approx(100 * (row["expected"] / row["measured"]["value"] - 1))
    assert full["expected"] > alone["expected"] > 0


async def test_requests_that_others_disturbed_are_no_measure_of_the_first_token(served, engine):
    see(engine, first_tokens=[msgspec.structs.replace(FIRST, was_alone=False)])
    rows = {row["figure"]: row for row in (await ask(served))["predicted"]}
    assert rows["first_token_s"]["measured"] is None


async def test_passes_with_drafts_are_no_measure_of_the_plan(served, engine):
    see(engine, msgspec.structs.replace(ONE, num_tokens=3, num_sampled=3))
    seen = await ask(served)
    assert seen["predicted"][0]["measured"] is None
    assert seen["now"]["decode"]["tokens_per_pass"] == 3


async def test_only_passes_of_five_seconds_are_now(served, engine):
    see(engine, msgspec.structs.replace(ONE, age_s=9.0, seconds=1.0), ONE)
    decode = (await ask(served))["now"]["decode"]
    assert (decode["num_passes"], decode["pass_s"]) == (10, pytest.approx(0.002))


async def test_two_engines_add_up(served, engine):
    see(engine, ONE)
    engine.sights[1] = engine.sights[0]
    decode = (await ask(served))["now"]["decode"]
    assert (decode["num_engines"], decode["pass_s"]) == (2, pytest.approx(0.002))
    assert decode["generated_per_s"] == pytest.approx(1000)


async def test_the_parts_of_memory_add_up(served, engine, plan):
    see(engine)
    engine.snapshot = EngineStats(kv_blocks_total=100, kv_blocks_used=10, kv_blocks_cached=20)
    seen = await ask(served)
    memory, block = seen["memory"], 16 * seen["model"]["kv_bytes_per_token"]
    parts = ("weights_bytes", "kv_used_bytes", "kv_cached_bytes", "other_bytes")
    assert sum(memory[name] for name in parts) == memory["used_bytes"] > 0
    assert (memory["kv_used_bytes"], memory["kv_cached_bytes"]) == (10 * block, 20 * block)
    assert (memory["kv_free_bytes"], memory["kv_tokens_free"]) == (70 * block, 90 * 16)
    assert memory["weights_bytes"] == round(seen["model"]["resident_bytes"])
    assert not memory["is_limit_set"]
    assert memory["used_bytes"] < memory["limit_bytes"]
    row = seen["predicted"][3]
    assert (row["measured"]["value"], row["measured"]["num_tokens"]) == (memory["used_bytes"], 30 * 16)


async def test_a_machine_that_was_never_measured_has_no_roofs_but_points(served, engine, plan, tmp_path):
    elsewhere = {**plan.settings, "cache_dir": str(tmp_path)}
    served.state.service.models.only.plan = dataclasses.replace(plan, settings=elsewhere)
    see(engine, ONE)
    seen = await ask(served)
    assert "moeflow plan" in seen["roofs"]["unknown"]
    assert (seen["roofs"]["memory_bytes_per_s"], seen["roofs"]["flops_per_s"]) == (None, {})
    decode = seen["now"]["decode"]
    assert (decode["share_of_roof"], decode["binds"], decode["roof_pass_s"]) == (None, None, None)
    assert decode["flops_per_s"] > 0
    row = seen["predicted"][0]
    assert row["measured"]["value"] == pytest.approx(500)
    assert (row["expected"], row["error_percent"]) == (None, None)
    assert "moeflow plan" in row["unknown"]


async def test_headers_that_cannot_be_read_are_the_reason_without_their_path(served, engine, plan, tmp_path):
    gone = dataclasses.replace(plan.config, model_path=str(tmp_path / "gone"))
    served.state.service.models.only.plan = dataclasses.replace(plan, config=gone)
    seen = await ask(served)
    assert seen["model"] is None
    assert plan.config.model_name in seen["unknown"]
    assert str(tmp_path) not in seen["unknown"]


def test_other_programs_are_told_apart_from_the_servers_own_work():
    others = OtherPrograms()
    assert others.look([]) is None
    busy_until_s = time.monotonic() + 1.2
    while time.monotonic() < busy_until_s:
        pass
    as_other, as_own = OtherPrograms(), OtherPrograms()
    before = others._looks[0]
    as_own._looks = deque([before])
    as_other._looks = deque([before._replace(own=0.0)])
    own, other = as_own.look(own_processes()), as_other.look([])
    assert 0.0 <= own < other <= 1.0


def test_the_share_of_other_programs_is_that_of_the_time_asked_about():
    others = OtherPrograms()
    first = others._looks[0]._replace(at_s=100.0, total=0.0, busy=0.0, own=0.0)
    others._looks = deque(
        [
            first,
            first._replace(at_s=110.0, total=20.0, busy=18.0, own=8.0),
            first._replace(at_s=120.0, total=40.0, busy=28.0, own=18.0),
            first._replace(at_s=900.0, total=1600.0, busy=30.0, own=18.0),
        ]
    )
    assert others.share_during(101.0, 109.0) == pytest.approx(0.5)
    assert others.share_during(111.0, 120.0) == 0.0
    assert others.share_during(400.0, 410.0) is None  # no look was near it


@pytest.mark.slow
async def test_a_real_engine_is_measured(plan, monkeypatch):
    monkeypatch.setattr("moeflow.server.speed.advice_run.AdviceRun.ask", lambda self: None)
    tokenizer = Tokenizer.load(plan.config.model_path)
    with closing(RealClient(plan.config)) as client:
        app = create_app(Generator(client, tokenizer), ServerConfig())
        app.state.service.models.only.plan = plan
        async with connect(app) as http:
            await http.get("/stats/speed")
            body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            seen = (await http.get("/stats/speed")).json()
    decode, rows = seen["now"]["decode"], {row["figure"]: row for row in seen["predicted"]}
    assert (decode["num_passes"], decode["tokens_per_pass"]) == (19, 1)
    assert decode["context"] == pytest.approx(5 + 10)
    assert decode["distinct_experts"] == 2
    assert rows["alone_tokens_per_s"]["measured"]["value"] == pytest.approx(1 / decode["pass_s"])
    assert rows["first_token_s"]["measured"]["num_tokens"] == 5
    assert rows["first_token_s"]["expected"] > 0

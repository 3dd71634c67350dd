from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeflow.core.engine_messages import EngineStats, RankStats, SpeculatorStats, TrialStats
from moeflow.engine.client import EngineState, ReplicaStatus
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.conftest import connect
from tests.server.fake_client import NAME, REPLY, FakeClient

pytestmark = pytest.mark.anyio

STATS = EngineStats(
    num_waiting=3,
    num_running=4,
    kv_blocks_total=100,
    kv_blocks_used=25,
    kv_blocks_cached=11,
    passes_total=12,
    failed_passes_total=1,
    prompt_tokens_total=500,
    prefix_hit_tokens_total=48,
    generated_tokens_total=777,
    requests_finished_total=9,
    requests_cancelled_total=2,
    preemptions_total=5,
    tokens_per_second=42.5,
    engine_restarts_total=3,
    is_engine_stalled=True,
)
RANKS = [
    RankStats(num_layers=3, busy_s_total=9.5, waited_s_total=0.5, num_experts=8, tokens_per_pass=4.5),
    RankStats(
        host="10.0.0.2",
        first_layer=3,
        num_layers=2,
        waited_s_total=2.5,
        is_slow=True,
        num_experts=12,
        tokens_per_pass=3.25,
    ),
]


async def read_metrics(http) -> dict[str, float]:
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.text))
    assert all(
        family.name.startswith(("moeflow_", "process_", "vllm:")) and family.documentation for family in families
    )
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_ask_for_the_head_alone(http, path):
    response = await http.head(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_what_the_engine_counts_is_passed_on(http, engine):
    engine.snapshot = STATS
    values = await read_metrics(http)
    expected = {
        "moeflow_requests_waiting": 3,
        "moeflow_requests_running": 4,
        "moeflow_tokens_per_second": 42.5,
        "moeflow_kv_usage_ratio": 0.25,
        "moeflow_kv_blocks": 100,
        "moeflow_kv_blocks_cached": 11,
        "moeflow_generated_tokens_total": 777,
        "moeflow_prompt_tokens_total": 500,
        "moeflow_prefix_hit_tokens_total": 48,
        "moeflow_requests_finished_total": 9,
        "moeflow_requests_cancelled_total": 2,
        "moeflow_preemptions_total": 5,
        "moeflow_passes_total": 12,
        "moeflow_failed_passes_total": 1,
        "moeflow_engine_restarts_total": 3,
        "moeflow_engine_stalled": 1,
    }
    assert {name: values[f"{name}[{NAME}]"] for name in expected} == expected


async def test_times_are_measured_per_sequence_and_per_request(http):
    for stream in (False, True):
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 100, "stream": stream}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    values = await read_metrics(http)
    assert values[f"moeflow_time_to_first_token_seconds_count[{NAME}]"] == 8
    assert values[f"moeflow_time_per_output_token_seconds_count[{NAME}]"] == 8
    assert values[f"moeflow_request_duration_seconds_count[{NAME}]"] == 2
    assert (
        0
        < values[f"moeflow_time_to_first_token_seconds_sum[{NAME}]"]
        < 8 * values[f"moeflow_request_duration_seconds_sum[{NAME}]"]
    )
    per_token = values[f"moeflow_time_per_output_token_seconds_sum[{NAME}]"] / 8
    assert 0 < per_token * len(REPLY.encode()) < values[f"moeflow_request_duration_seconds_sum[{NAME}]"]
    assert values[f"moeflow_sequences_unfinished[{NAME}]"] == 0


async def test_refusals_are_counted_by_reason(http):
    await http.post("/v1/completions", json={"prompt": ""})
    await http.post("/v1/completions", json={"prompt": "x" * 300})
    await http.post("/v1/completions", json={"prompt": "x", "model": "y"})
    await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    await http.get("/health", headers={"host": "evil.example"})
    await http.get("/favicon-that-is-not-there")
    values = await read_metrics(http)
    rejected = {name: value for name, value in values.items() if name.startswith("moeflow_requests_rejected_total")}
    reasons = ("invalid_value", "context_length_exceeded", "model_not_found", "invalid_json", "host_not_allowed")
    assert rejected == {f"moeflow_requests_rejected_total[{reason}]": 1 for reason in reasons}


async def test_failures_are_counted(http, engine):
    engine.fail_after = 1
    await http.post("/v1/completions", json={"prompt": "x"})
    assert (await read_metrics(http))[f"moeflow_requests_failed_total[{NAME}]"] == 1


async def test_stats_for_the_page(http, engine):
    engine.snapshot = STATS
    stats = (await http.get("/stats")).json()
    for name, value in msgspec.structs.asdict(STATS).items():
        assert stats[name] == value
    assert stats["status"] == "ready"
    assert stats["uptime_s"] > 0
    assert stats["num_unfinished"] == 0
    assert stats["model"]["name"] == NAME
    assert stats["model"]["num_experts"] == 4
    assert stats["model"]["eos_token_ids"] == [1]
    assert "path" not in stats["model"]


async def test_engines_are_seen_while_the_first_one_starts(engine):
    app = create_app(None, ServerConfig())
    starting: list[FakeClient] = []
    app.state.service.show_start(starting)
    async with connect(app) as http:
        assert (await http.get("/health")).json()["num_replicas"] == 0
        starting.append(engine)
        engine.replica_statuses = [
            ReplicaStatus(EngineState.RESTARTING, EngineStats(), host="b", activity="pulling o/m: 40%"),
            ReplicaStatus(EngineState.RESTARTING, EngineStats(), activity="loading: 7%"),
            ReplicaStatus(EngineState.RESTARTING, EngineStats()),
        ]
        assert (await http.get("/health")).json() == {
            "status": "loading",
            "num_replicas": 3,
            "num_replicas_ready": 0,
            "starting": ["b: pulling o/m: 40%", "server: loading: 7%"],
        }
        assert [it["activity"] for it in (await http.get("/stats")).json()["replicas"]][1:] == ["loading: 7%", ""]
        assert (await http.get("/metrics")).status_code == 200


async def test_each_replica_has_its_own_numbers_beside_the_totals(http, engine):
    engine.snapshot = msgspec.structs.replace(STATS, num_running=7)
    engine.replica_statuses = [
        ReplicaStatus(EngineState.READY, msgspec.structs.replace(STATS, ranks=RANKS), host="a"),
        ReplicaStatus(EngineState.READY, msgspec.structs.replace(STATS, num_running=3), is_slow=True, host="b"),
        ReplicaStatus(EngineState.RESTARTING, EngineStats(engine_restarts_total=2)),
    ]
    assert (await http.get("/health")).json() == {
        "status": "ready",
        "num_replicas": 3,
        "num_replicas_ready": 2,
        "starting": [],
    }
    stats = (await http.get("/stats")).json()
    assert stats["num_running"] == 7
    assert [(each["state"], each["is_slow"], each["num_running"]) for each in stats["replicas"]] == [
        ("ready", False, 4),
        ("ready", True, 3),
        ("restarting", False, 0),
    ]
    assert stats["replicas"][0]["ranks"][1] == {
        "host": "10.0.0.2",
        "first_layer": 3,
        "num_layers": 2,
        "busy_s_total": 0.0,
        "waited_s_total": 2.5,
        "is_slow": True,
        "num_experts": 12,
        "tokens_per_pass": 3.25,
    }
    values = await read_metrics(http)
    assert values[f"moeflow_rank_waited_seconds_total[10.0.0.2][{NAME}][1][0]"] == 2.5
    assert values[f"moeflow_rank_busy_seconds_total[a][{NAME}][0][0]"] == 9.5
    assert values[f"moeflow_rank_layers[10.0.0.2][{NAME}][1][0]"] == 2
    assert values[f"moeflow_rank_experts[10.0.0.2][{NAME}][1][0]"] == 12
    assert [values[f"moeflow_rank_slow[{host}][{NAME}][{rank}][0]"] for rank, host in enumerate(("a", "10.0.0.2"))] == [
        0,
        1,
    ]
    assert values[f"moeflow_rank_tokens_per_pass[a][{NAME}][0][0]"] == 4.5
    assert f"moeflow_rank_experts[b][{NAME}][0][1]" not in values
    expected = {
        "moeflow_requests_running": 7,
        "moeflow_replica_ready": (1, 1, 0),
        "moeflow_replica_slow": (0, 1, 0),
        "moeflow_replica_requests_waiting": (3, 3, 0),
        "moeflow_replica_requests_running": (4, 3, 0),
        "moeflow_replica_tokens_per_second": (42.5, 42.5, 0),
        "moeflow_replica_kv_usage_ratio": (0.25, 0.25, 0),
        "moeflow_replica_generated_tokens_total": (777, 777, 0),
        "moeflow_replica_restarts_total": (3, 3, 2),
    }
    for name, want in expected.items():
        labels = [f"[{host}][{NAME}][{it}]" for it, host in enumerate(("a", "b", ""))]
        found = tuple(values[name + it] for it in labels) if isinstance(want, tuple) else values[f"{name}[{NAME}]"]
        assert found == want, name


async def test_models(http):
    models = (await http.get("/v1/models")).json()
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (
        model.items()
        >= {
            "id": NAME,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "moeflow",
            "max_model_len": 256,
            "status": "ready",
            "default_sampling_params": {},
        }.items()
    )
    assert (await http.get(f"/v1/models/{NAME}")).json() == model
    response = await http.get("/v1/models/other/name")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_tokenize_a_text_and_back(http, tokenizer):
    body = (await http.post("/tokenize", json={"prompt": "Grüße"})).json()
    assert body == {"tokens": tokenizer.encode("Grüße"), "count": 7, "max_model_len": 256}
    assert (await http.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": "Grüße"}


async def test_tokenize_a_conversation(http, tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    body = (await http.post("/tokenize", json={"messages": messages})).json()
    assert tokenizer.decode(body["tokens"]) == "<|user|>Hi<|assistant|>"
    assert body["count"] == len(body["tokens"])


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"text": "x"}])
async def test_tokenize_needs_one_thing(http, body):
    assert (await http.post("/tokenize", json=body)).status_code == 400


@pytest.mark.parametrize("tokens", [[258], [-1], ["x"], [10**30], None])
async def test_detokenize_knows_its_vocabulary(http, tokens):
    response = await http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


async def test_an_empty_text_has_no_tokens(http):
    assert (await http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_drafts_by_speculator_and_depth(http, engine):
    def speculator(name, drafted, accepted, **values):
        return SpeculatorStats(name=name, drafted_total=drafted, accepted_total=accepted, **values)

    suffix = speculator("suffix", [9, 4, 1], [6, 2, 0], drafting_s_total=0.5)
    trial = TrialStats(name="drafts by suffix", is_on=True, reason="passes take 30% less time with it")
    draft = speculator("draft", [5, 0, 0], [1, 0, 0], drafting_s_total=2.5, is_resting=True)
    engine.snapshot = EngineStats(
        speculated_passes_total=11,
        drafted_tokens_total=19,
        accepted_tokens_total=9,
        drafting_s_total=3.0,
        trees_total=[4, 5, 2],
        speculators=[suffix, draft],
        trials=[trial],
    )
    engine.replica_statuses = [
        ReplicaStatus(EngineState.READY, engine.snapshot),
        ReplicaStatus(EngineState.READY, msgspec.structs.replace(engine.snapshot, speculators=[suffix])),
    ]
    values = await read_metrics(http)
    expected = {
        f"moeflow_speculated_passes_total[{NAME}]": 11,
        f"moeflow_drafting_seconds_total[{NAME}]": 3.0,
        f"moeflow_speculator_drafted_tokens_total[1][{NAME}][suffix]": 9,
        f"moeflow_speculator_drafted_tokens_total[3][{NAME}][suffix]": 1,
        f"moeflow_speculator_drafted_tokens_total[1][{NAME}][draft]": 5,
        f"moeflow_speculator_accepted_tokens_total[2][{NAME}][suffix]": 2,
        f"moeflow_speculator_accepted_tokens_total[1][{NAME}][draft]": 1,
        f"moeflow_speculator_drafting_seconds_total[{NAME}][draft]": 2.5,
        f"moeflow_speculator_resting[][{NAME}][0][suffix]": 0,
        f"moeflow_speculator_resting[][{NAME}][0][draft]": 1,
        f"moeflow_speculator_resting[][{NAME}][1][suffix]": 0,
        f"moeflow_accepted_tokens_per_tree_bucket[0.0][{NAME}]": 4,
        f"moeflow_accepted_tokens_per_tree_bucket[1.0][{NAME}]": 9,
        f"moeflow_accepted_tokens_per_tree_bucket[+Inf][{NAME}]": 11,
        f"moeflow_accepted_tokens_per_tree_count[{NAME}]": 11,
        f"moeflow_accepted_tokens_per_tree_sum[{NAME}]": 9,
    }
    assert {name: values[name] for name in expected} == expected
    assert f"moeflow_speculator_resting[][{NAME}][1][draft]" not in values
    stats = (await http.get("/stats")).json()
    assert stats["speculators"] == [msgspec.to_builtins(suffix), msgspec.to_builtins(draft)]
    assert stats["trials"] == [msgspec.to_builtins(trial)]
    assert stats["trees_total"] == [4, 5, 2]


async def test_without_speculators_there_are_no_samples_of_them(http):
    assert not [
        name
        for name in await read_metrics(http)
        if name.startswith(("moeflow_speculator", "moeflow_accepted_tokens_per"))
    ]


async def test_the_model_is_named_with_what_makes_its_answers_differ(http, engine):
    engine.model = msgspec.structs.replace(engine.model, name="reviews:lossy-sida:3", lossy_top_k=3)
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    (sample,) = (it for family in families for it in family.samples if it.name == "moeflow_model_info")
    assert (sample.labels["model"], sample.labels["lossy_top_k"]) == ("reviews:lossy-sida:3", "3")
    assert (await http.get("/stats")).json()["model"]["lossy_top_k"] == 3


async def test_the_number_of_engines_on_one_machine_is_fixed(make_app):
    async with connect(make_app(api_key="k")) as http:
        http.headers["x-api-key"] = "k"
        refused = await http.post("/replicas", json={"num_replicas": 2})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "replicas_fixed"
        assert (await http.post("/replicas", json={"num_replicas": 0})).status_code == 400
        reason = "this server has one engine, in its own process"
        told = {"num_replicas": 1, "scale_refusal": reason, "fronts": []}
        assert (await http.get("/replicas")).json() == told

import dataclasses
import importlib.util
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.cli.served_models import SeveralModels
from moeflow.core.errors import ConfigError
from moeflow.planner.hardware.host import host_resources
from moeflow.server.config import ServerConfig
from moeflow.server.launch import PlanMore, PlannedModel
from moeflow.settings.settings import Settings
from tests.planner.example_plans import PLAN
from tests.tiny_mixtral import write_tiny_mixtral

EVERY_OPTION = """
    --host 0.0.0.0 --port 9 --api-key k --allowed-host a --allowed-host b --max-queue 5 --fronts 2 --max-body 1MiB
    --unknown-fields ignore --images placeholder --grpc-port 10
    --shutdown-deadline 2.5 --data-dir my/jobs --max-file 1GiB --file-quota 2GiB
    --api-keys-file keys.toml --cors-origin https://a.example --cors-origin http://localhost:3000
    --tls-cert cert.pem --tls-key key.pem --forwarded-allow-ips 10.0.0.0/8 --root-path /llm
    --max-engine-restarts 7 --engine-timeout 45 --log-level debug --log-format json --log-prompts
    --model-name m --max-num-batched-tokens 64 --no-prefix-caching --max-num-seqs 4
    --dtype bfloat16 --kv-dtype int8 --device cpu --threads 3 --replicas 2 --max-model-len 100 --kv-cache 1GiB
"""


@pytest.fixture
def served(monkeypatch):
    """Stand in for the server: return its settings."""
    calls: list[tuple[Settings, ServerConfig]] = []

    def serve(plan: Callable[[], Settings], config: ServerConfig) -> int:
        calls.append((plan(), config))
        return 0

    monkeypatch.setitem(vars(lazy), "serve", serve)
    monkeypatch.setitem(vars(lazy), "plan_for_start", lambda settings, usage, on_step, resources: settings)
    monkeypatch.delenv("MOEFLOW_API_KEY", raising=False)
    return calls


def run(*args: str):
    return CliRunner().invoke(main, ["serve", "./my/model", *args], catch_exceptions=False)


def test_without_options_the_defaults_are_those_of_the_floors_below(served, tmp_path):
    assert run("--cache-dir", str(tmp_path)).exit_code == 0
    assert served == [
        (Settings(model="./my/model", cache_dir=tmp_path, is_served=True), ServerConfig(data_dir=tmp_path / "jobs"))
    ]


def test_every_wish_arrives(served, tmp_path):
    result = run(*EVERY_OPTION.split(), "--cache-dir", str(tmp_path))
    assert result.exit_code == 0
    settings = Settings(
        model="./my/model",
        model_name="m",
        dtype="bfloat16",
        kv_dtype="int8",
        device="cpu",
        num_threads=3,
        num_replicas=2,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_bytes=1024**3,
        prefix_caching=False,
        cache_dir=tmp_path,
        is_served=True,
    )
    config = ServerConfig(
        host="0.0.0.0",
        port=9,
        grpc_port=10,
        api_key="k",
        api_keys_file=Path("keys.toml"),
        allowed_hosts=("a", "b"),
        cors_origins=("https://a.example", "http://localhost:3000"),
        tls_cert=Path("cert.pem"),
        tls_key=Path("key.pem"),
        forwarded_allow_ips="10.0.0.0/8",
        root_path="/llm",
        max_queue=5,
        num_fronts=2,
        unknown_fields="ignore",
        images="placeholder",
        max_body_bytes=1024**2,
        data_dir=Path("my/jobs"),
        max_file_bytes=1024**3,
        file_quota_bytes=2 * 1024**3,
        shutdown_deadline_s=2.5,
        log_level="debug",
        log_format="json",
        log_prompts=True,
        max_engine_restarts=7,
        engine_timeout_s=45.0,
    )
    assert served == [(settings, config)]


def test_the_key_may_come_from_the_environment(served, monkeypatch):
    monkeypatch.setenv("MOEFLOW_API_KEY", "secret")
    assert run().exit_code == 0
    assert served[0][1].api_key == "secret"


@pytest.mark.parametrize(
    ("key", "why"), [("", "MOEFLOW_API_KEY is empty"), (" ", "the key is empty"), ("\udcff", "UTF-8"), ("a\n", "UTF-8")]
)
def test_a_key_that_would_open_the_server_or_never_fit_is_refused(served, monkeypatch, key, why):
    monkeypatch.setenv("MOEFLOW_API_KEY", key)
    done = run()
    assert (done.exit_code, served) == (2, [])
    assert why in done.stderr
    assert run("--api-key", "typed").exit_code == 0
    assert served[0][1].api_key == "typed"


def test_the_servers_exit_code_is_the_shells(served, monkeypatch):
    monkeypatch.setitem(vars(lazy), "serve", lambda prepare, config: 3)
    assert run().exit_code == 3


@pytest.fixture
def several(monkeypatch, tmp_path, served):
    """Stand in for the server of several models; return its settings, and a folder with two models."""
    calls: list[tuple[dict[str, Settings], int]] = []

    def serve_several(
        models: dict[str, PlannedModel], budget_bytes: int, config: ServerConfig, plan_more: PlanMore
    ) -> int:
        calls.append(({name: model.plan() for name, model in models.items()}, budget_bytes))
        name, added = plan_more("o/pulled", str(tmp_path / "one"))
        first = calls[-1][0][next(iter(models))]
        assert (name, added.plan()) == ("o/pulled", dataclasses.replace(first, model=added.path, model_name="o/pulled"))
        return 0

    monkeypatch.setitem(vars(lazy), "serve_several", serve_several)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return calls


def run_several(*args: str):
    return CliRunner().invoke(main, ["serve", *args], catch_exceptions=False)


def test_several_models_have_their_names_and_one_budget(several, tmp_path):
    assert run_several("./one", "--model", "2nd=two", "--memory", "3GiB", "--cache-dir", "c").exit_code == 0
    ((models, budget_bytes),) = several
    common = {"memory_bytes": budget_bytes, "cache_dir": Path("c"), "is_served": True, "shares_memory": True}
    assert models == {
        "one": Settings(model=str(tmp_path / "one"), model_name="one", **common),
        "2nd": Settings(model=str(tmp_path / "two"), model_name="2nd", **common),
    }
    assert budget_bytes == 3 * 1024**3


def test_without_a_budget_it_is_what_is_free_at_the_start(several):
    assert run_several("--model", "one", "--model", "two", "--quantize", "int8").exit_code == 0
    ((models, budget_bytes),) = several
    assert [(it.memory_bytes, it.quantize) for it in models.values()] == [(None, "int8")] * 2
    assert 0 < budget_bytes <= lazy.host_resources().total_bytes


def test_one_model_by_the_option_is_one_model_and_may_have_a_name(several, served):
    assert run_several("--model", "me=one").exit_code == 0
    assert run_several("--model", "two").exit_code == 0
    assert [(it.model, it.model_name, it.shares_memory) for it, _ in served] == [
        ("one", "me", False),
        ("two", None, False),
    ]
    assert several == []


def test_a_file_lists_several_models_and_the_command_line_goes_first(several, served, tmp_path):
    (tmp_path / "c.toml").write_text('[serve]\nmodels = ["one", "b=two"]\n')
    assert run_several("--config", "c.toml").exit_code == 0
    assert list(several[0][0]) == ["one", "b"]
    assert run_several("--config", "c.toml", "two").exit_code == 0
    assert [it.model for it, _ in served] == ["two"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["one", "--model", "one"], "two models are called 'one': give one another name, NAME=one"),
        (["one", "--model", "three"], "three"),
        (["one", "--model", "two", "--model-name", "x"], "--model-name is for one model"),
        (["one", "--model", "two", "--trace", "t.json"], "--trace is for one model"),
    ],
)
def test_what_several_models_cannot_be_served_with(several, args, reason):
    result = CliRunner().invoke(main, ["serve", *args])
    assert result.exit_code == 2
    assert reason in result.stderr
    assert several == []


@pytest.mark.slow  # plans
def test_each_of_several_models_is_explained_and_whether_all_fit(monkeypatch, tmp_path):
    here = dataclasses.replace(host_resources(), process_bytes=0)  # the tests before may have left more than the limit
    monkeypatch.setitem(vars(lazy), "host_resources", lambda *_: here)
    for name in ("small", "large"):
        write_tiny_mixtral(tmp_path / name, num_hidden_layers=1 + 2 * (name == "large"))
    named = ["--model", f"1st={tmp_path / 'small'}", "--model", str(tmp_path / "large"), "--cache-dir", str(tmp_path)]
    explained = run_several(*named, "--memory", "3GiB", "--explain")
    assert explained.exit_code == 0
    first, second = explained.stdout.split(f"large: {tmp_path / 'large'}\n")
    assert first.startswith(f"1st: {tmp_path / 'small'}\n")
    for part, name in ((first, "small"), (second, "large")):
        assert re.search(rf"^{name} on .*, for throughput: ", part, re.MULTILINE)
        assert "in memory" in part
    assert "of the 3.0 GiB that they share: all can be loaded at once." in second


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((300, 400), "hold 700.0 MiB of the 700.0 MiB that they share: all can be loaded at once."),
        ((300, 401), "would hold 701.0 MiB, and share 700.0 MiB: those that are idle make room for others."),
        ((300, 0), "would hold 1000.0 MiB, and share 700.0 MiB"),  # 0: not known, so it gets all
    ],
)
def test_what_models_hold_together_is_told(sizes, said, monkeypatch, capsys):
    monkeypatch.setattr("moeflow.cli.served_models.explain", lambda plan: None)
    models = {
        str(size): PlannedModel("/m", partial(dataclasses.replace, PLAN, memory_bytes=size << 20)) for size in sizes
    }
    assert SeveralModels(models, 700 << 20).explain() == 0
    assert said in capsys.readouterr().out


@pytest.mark.slow  # likewise
def test_a_model_that_cannot_be_planned_is_named_and_the_others_are_explained(tmp_path):
    (tmp_path / "one").mkdir()
    write_tiny_mixtral(tmp_path / "good")
    named = ["--model", str(tmp_path / "one"), "--model", str(tmp_path / "good")]  # one is empty
    explained = run_several(*named, "--cache-dir", str(tmp_path), "--explain")
    assert explained.exit_code == 1
    assert "error: one cannot be planned: " in explained.stderr
    assert re.search(r"^good on .*, for throughput: ", explained.stdout, re.MULTILINE)


@pytest.fixture
def unmade(monkeypatch):
    """Refuse to look for a model."""

    def built_in_model(cache_dir: Path) -> Path:
        raise ConfigError("looked for a model")

    monkeypatch.setattr("moeflow.cli.local_model.built_in_model", built_in_model)


def test_a_wrong_wish_is_told_before_a_model_is_looked_for(served, unmade):
    result = run("--port", "99999")
    assert (result.exit_code, result.stderr) == (2, "error: port must be from 0 to 65535, not 99999\n")
    result = run("--port", "8000", "--grpc-port", "8000")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: port and grpc_port are both 8000; give gRPC a port of its own\n",
    )


@pytest.mark.parametrize(
    ("missing", "port", "said"),
    [
        (
            "grpc_health",
            "0",
            "gRPC (--grpc-port) needs grpcio and grpcio-health-checking: run `pip install 'moeflow[grpc]'`",
        ),
        (None, "70000", "grpc_port must be from 0 to 65535, not 70000"),
    ],
)
@pytest.mark.slow  # imports the server
def test_grpc_that_cannot_be_served_is_told_before_a_model_is_looked_for(unmade, monkeypatch, missing, port, said):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name))
    result = run("--port", "0", "--grpc-port", port)
    assert (result.exit_code, result.stderr) == (2, f"error: {said}\n")


@pytest.mark.slow  # imports the server
def test_a_taken_port_is_told_before_a_model_is_looked_for(unmade):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--grpc-port"):
            result = run("--port", "0", option, str(port))
            assert result.exit_code == 2
            assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: the port is in use")
            assert result.stderr.endswith(f"choose another with {option}\n")

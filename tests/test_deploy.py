"""The files of deploy/: systemd and the command line take the service; dashboard and alerts use existing metrics."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import click
import pytest

from moeflow.cli.main import EXIT_BAD_INPUT, main
from moeflow.cli.serve import serve
from moeflow.server.config import ServerConfig
from moeflow.server.metrics import Metrics
from moeflow.server.model_pool import ModelPool
from tests.documents import ROOT

UNIT = ROOT / "deploy" / "moeflow.service"
INSTALLED = "/opt/moeflow/bin/moeflow"
ALERTS = ROOT / "deploy" / "alerts.yml"
PROMTOOL = shutil.which("promtool")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))


def unit_value(key: str) -> str:
    """Return what the unit sets once."""
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    return value


def test_the_service_runs_a_command_line_that_is_understood_and_listens_on_loopback(monkeypatch):
    monkeypatch.delenv("MOEFLOW_API_KEY", raising=False)
    program, verb, *args = shlex.split(unit_value("ExecStart"))
    assert (program, verb) == (INSTALLED, "serve")
    installed = {"/etc/moeflow/moeflow.toml": str(ROOT / "deploy" / "moeflow.toml")}
    context = serve.make_context("serve", [installed.get(arg, arg) for arg in args], parent=click.Context(main))
    assert set(installed) <= set(args)
    assert ServerConfig(host=context.params["host"]).is_loopback
    assert context.params["log_format"] == "json"  # the file's, so it was read
    assert str(context.params["data_dir"]).startswith(f"/var/lib/{unit_value('StateDirectory')}/")


def test_the_service_gives_requests_their_time_and_is_not_started_again_in_vain():
    assert int(unit_value("TimeoutStopSec")) > ServerConfig().shutdown_deadline_s
    assert int(unit_value("RestartPreventExitStatus")) == EXIT_BAD_INPUT
    assert unit_value("OOMPolicy") == "continue"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_service_and_finds_it_confined(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(INSTALLED, sys.executable))
    for command in (["verify"], ["security", "--offline=true", "--threshold=20"]):  # of 100, which is no confinement
        run = subprocess.run(["systemd-analyze", *command, str(unit)], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        assert command != ["verify"] or run.stderr == ""  # unknown keys are warnings


def exported() -> set[str]:
    """Return the names of all samples in /metrics, including those of only some servers."""
    text = Metrics(ModelPool(max_queue=0)).exposition().decode()
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def test_the_dashboard_shows_metrics_that_there_are():
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    queries += [it["query"] for it in DASHBOARD["templating"]["list"]]
    named = set(re.findall(r"moeflow_\w+", " ".join(queries)))
    assert len(named) > 30
    assert named - exported() == set()


def test_the_dashboard_shows_the_chosen_models_alone():
    assert [it["name"] for it in DASHBOARD["templating"]["list"]] == ["datasource", "instance", "model"]
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    for name, labels in re.findall(r"(\w+)\{([^}]*)\}", " ".join(queries)):
        is_of_all = name.startswith(("moeflow_http_", "moeflow_key_", "moeflow_requests_rejected", "process_"))
        assert 'instance=~"$instance"' in labels, name
        assert ('model=~"$model"' in labels) != is_of_all, name


def test_alerts_watch_metrics_that_there_are():
    expressions = re.findall(
        r"^        expr:(.*?)^        \w", ALERTS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    named = set(re.findall(r"\b(?:moeflow|process)_\w+", " ".join(expressions)))
    assert len(named) == 11
    assert named - exported() == set()


FIRES = """
rule_files: [ALERTS]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'moeflow_engine_stalled{instance="a", model="m"}', values: '1x30'}
      - {series: 'moeflow_engine_stalled{instance="b", model="m"}', values: '0x30'}
      - {series: 'moeflow_http_requests_total{instance="a", endpoint="/v1/models", status="200"}', values: '0+90x30'}
      - {series: 'moeflow_http_requests_total{instance="a", endpoint="/v1/models", status="500"}', values: '0+10x30'}
      - {series: 'moeflow_http_requests_total{instance="b", endpoint="/v1/models", status="404"}', values: '0+90x30'}
      - {series: 'moeflow_http_requests_total{instance="b", endpoint="/health", status="503"}', values: '0+90x30'}
    alert_rule_test:
      - eval_time: 20m
        alertname: MoeflowEngineStalled
        exp_alerts:
          - exp_labels: {severity: critical, instance: a, model: m}
            exp_annotations: {summary: An engine of m on a does not answer}
      - eval_time: 20m
        alertname: MoeflowServerErrors
        exp_alerts:
          - exp_labels: {severity: critical, instance: a}
            exp_annotations: {summary: More than 5% of requests to a fail}
"""


@pytest.mark.skipif(PROMTOOL is None, reason="needs Prometheus' promtool")
def test_prometheus_takes_the_alerts_and_they_fire(tmp_path):
    (tmp_path / "test.yml").write_text(FIRES.replace("ALERTS", str(ALERTS)), encoding="utf-8")
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(tmp_path / "test.yml")]):
        run = subprocess.run([str(PROMTOOL), *command], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_dashboard_counts_totals_as_rates_and_nothing_else():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for function, name, window in re.findall(r"(\w+)\((moeflow_\w+)\{[^}]*\}(\[?)", target["expr"]):
                is_rate = function in {"rate", "increase"}
                assert is_rate == name.endswith(("_total", "_bucket")) == bool(window), target["expr"]


def test_panels_lie_side_by_side_and_have_their_own_ids():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))

"""deploy/ for several machines: files parse, commands have options that exist, and limits are consistent.

`test_a_slurm_job_serves_and_ends_in_order` runs the script with a `srun` that starts processes of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from moeflow.cli.chaos.deployment import free_port
from moeflow.cli.join import join
from moeflow.cli.main import main
from moeflow.cli.serve import serve
from moeflow.parallel.tcp.cluster_token import read_token
from moeflow.server.config import ServerConfig
from tests.documents import ROOT
from tests.engine.ranks.joiners import PATIENCE_S
from tests.tiny_mixtral import write_tiny_mixtral

DEPLOY = ROOT / "deploy"
PLAIN, SERVICE, RAY = (DEPLOY / "kubernetes" / name for name in ("moeflow.yaml", "service.yaml", "kuberay.yaml"))
COMPOSE, SLURM = DEPLOY / "compose.yaml", DEPLOY / "moeflow.sbatch"
VERBS = {"serve": serve, "join": join}


def resources(file: Path) -> dict[tuple[str, str], dict]:
    return {(it["kind"], it["metadata"]["name"]): it for it in yaml.safe_load_all(file.read_text(encoding="utf-8"))}


def pods(file: Path) -> dict[str, dict]:
    """Return the specification of each kind of pod."""
    found = resources(file)
    if file == PLAIN:
        kinds = {"server": ("Deployment", "moeflow-server"), "engine": ("StatefulSet", "moeflow-engine")}
        return {name: found[kind]["spec"]["template"]["spec"] for name, kind in kinds.items()}
    spec = found["RayCluster", "moeflow"]["spec"]
    return {
        "server": spec["headGroupSpec"]["template"]["spec"],
        "engine": spec["workerGroupSpecs"][0]["template"]["spec"],
    }


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines of moeflow in the files, with values in place of variables."""
    for pod in pods(PLAIN).values():
        yield "kubernetes", pod["containers"][0]["args"]
    (script,) = pods(RAY)["server"]["containers"][0]["args"]
    yield "kuberay", shlex.split(script.partition("exec moeflow ")[2])
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        yield "compose", service["command"]
    text = SLURM.read_text().replace("\\\n", " ")
    known = {
        "model": "m",
        "engines": "3",
        "head": "a",
        "join_port": "9200",
        "threads": "2",
        "port": "8000",
        "token": "t",
    }
    for line in re.findall(r"^\s*moeflow (.*) &$|moeflow (join .*) &$", text, re.MULTILINE):
        yield "slurm", shlex.split(re.sub(r"\$(\w+)", lambda name: known[name[1]], "".join(line)))


def parsed(arguments: list[str]) -> dict:
    verb, *rest = arguments
    return VERBS[verb].make_context(verb, rest, parent=click.Context(main)).params


def test_every_command_line_is_understood(monkeypatch):
    monkeypatch.delenv("MOEFLOW_API_KEY", raising=False)
    seen = [(where, arguments[0], parsed(arguments)) for where, arguments in commands()]
    assert [(where, verb) for where, verb, _ in seen] == [
        ("kubernetes", "serve"),
        ("kubernetes", "join"),
        ("kuberay", "serve"),
        ("compose", "serve"),
        ("compose", "join"),
        ("slurm", "serve"),
        ("slurm", "join"),
    ]


def test_as_many_engines_join_as_the_server_waits_for():
    engines = resources(PLAIN)["StatefulSet", "moeflow-engine"]["spec"]["replicas"]
    args = pods(PLAIN)["server"]["containers"][0]["args"]
    assert f"--replicas={engines}" in args
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert f"--replicas={services['engine']['deploy']['replicas']}" in services["server"]["command"]
    spec = resources(RAY)["RayCluster", "moeflow"]["spec"]
    workers, (script,) = spec["workerGroupSpecs"][0], pods(RAY)["server"]["containers"][0]["args"]
    assert f"--replicas {workers['minReplicas']} --max-replicas {workers['maxReplicas']} " in script


@pytest.mark.parametrize("file", [PLAIN, RAY], ids=lambda file: file.stem)
def test_pods_get_the_time_to_end_and_the_probes_are_the_server_s(file):
    server, engine = pods(file)["server"], pods(file)["engine"]
    container = server["containers"][0]
    command = " ".join([*container.get("command", []), *container["args"]])
    deadline_s = float(re.search(r"--shutdown-deadline[= ](\d+)", command)[1])
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert server["terminationGracePeriodSeconds"] >= deadline_s + pause_s + 10
    assert engine["terminationGracePeriodSeconds"] >= 60
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: it["path"] for name, it in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    (port,) = [it["containerPort"] for it in container["ports"] if it["name"] == "http"]
    assert re.search(r"--port[= ](\d+)", command)[1] == str(port)


@pytest.mark.parametrize("file", [PLAIN, RAY], ids=lambda file: file.stem)
def test_volumes_secrets_and_labels_that_are_used_exist(file):
    found = resources(file) | (resources(SERVICE) if file == PLAIN else {})
    for pod in pods(file).values():
        volumes = {it["name"] for it in pod.get("volumes", ())}
        for (kind, _), resource in found.items():
            if kind == "StatefulSet":
                volumes |= {it["metadata"]["name"] for it in resource["spec"]["volumeClaimTemplates"]}
        assert {it["name"] for it in pod["containers"][0]["volumeMounts"]} <= volumes
    made = re.findall(r"--from-literal=([\w-]+)", file.read_text())
    text = json.dumps([*found.values()])
    assert set(re.findall(r'"key": "([\w-]+)"', text)) == set(made)
    if file == PLAIN:
        for kind in ("Service", "PodDisruptionBudget"):
            for (its, name), resource in found.items():
                selector = resource["spec"].get("selector", {})
                labels = selector.get("matchLabels", selector)
                owners = [it for it in found.values() if it["kind"] in ("Deployment", "StatefulSet")]
                assert its != kind or any(
                    labels.items() <= it["spec"]["template"]["metadata"]["labels"].items() for it in owners
                ), name


def test_the_pause_before_the_end_of_a_ray_worker_ends_its_keeper_in_order(tmp_path):
    """The shell's patterns name the keeper's process, and not the shell or grep."""
    (_, _, script) = pods(RAY)["engine"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    keeper = [sys.executable, "-c", "import time; time.sleep(600)", "moeflow.processes.cluster.ray_keeper"]
    with subprocess.Popen(keeper) as process:
        try:
            mine = script.replace("/proc/[0-9]*", f"/proc/{process.pid}")
            subprocess.run(["sh", "-c", f"({mine}) & wait $!"], check=True, timeout=PATIENCE_S)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_second_release_has_names_and_labels_of_its_own():
    """As docs/guides/upgrade.md makes it."""
    guide = (DEPLOY.parent / "docs" / "guides" / "upgrade.md").read_text(encoding="utf-8")
    command = re.search(r"^sed .*$", guide, re.MULTILINE)[0].partition(" | ")[0]
    other = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    second = {(it["kind"], it["metadata"]["name"]): it for it in yaml.safe_load_all(other)}
    first = resources(PLAIN)
    assert len(second) == len(first)
    assert not second.keys() & first.keys()
    service = second["Service", "moeflow-engines-b"]
    assert service["spec"]["selector"]["release"] == "b"
    engine = second["StatefulSet", "moeflow-engine-b"]["spec"]
    assert engine["serviceName"] == "moeflow-engines-b"
    assert "moeflow-engines-b:9200" in engine["template"]["spec"]["containers"][0]["args"]
    claim = second["Deployment", "moeflow-server-b"]["spec"]["template"]["spec"]["volumes"][0]
    assert ("PersistentVolumeClaim", claim["persistentVolumeClaim"]["claimName"]) in second


def test_compose_shares_one_token_and_publishes_to_this_machine_only():
    compose = yaml.safe_load(COMPOSE.read_text())
    server, engine = compose["services"]["server"], compose["services"]["engine"]
    assert all(it.startswith("127.0.0.1:") for it in server["ports"])
    assert {it.split(":")[0] for it in server["volumes"]} == set(compose["volumes"])
    tokens = [re.search(r"--cluster-token-file=(\S+)", " ".join(it["command"]))[1] for it in (server, engine)]
    folders = [{it.split(":")[1] for it in service["volumes"]} for service in (server, engine)]
    assert all(os.path.dirname(token) in places for token, places in zip(tokens, folders, strict=True))
    assert float(server["stop_grace_period"].rstrip("s")) > ServerConfig().shutdown_deadline_s
    assert (COMPOSE.parent / server["build"]["context"] / server["build"]["dockerfile"]).exists()


@pytest.mark.skipif(shutil.which("kubernetes-validate") is None, reason="needs kubernetes-validate")
def test_kubernetes_takes_the_manifests():
    for file in (PLAIN, SERVICE, RAY):
        run = subprocess.run(
            ["kubernetes-validate", "--strict", str(file)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_slurm_script_is_a_shell_script(tmp_path):
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SLURM)], check=True)
    missing = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "usage: sbatch moeflow.sbatch MODEL" in missing.stderr


SRUN = """#!/bin/bash
# Starts as many processes of this machine as there are tasks, and passes signals on.
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; echo "$1" >>"$SRUN_OPTIONS"; shift; done
for ((task = 0; task < tasks; task++)); do "$@" & done
trap 'kill -TERM $(jobs -p)' TERM
wait; wait
"""


@pytest.mark.thorough
def test_a_slurm_job_serves_and_ends_in_order(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    programs = {"srun": SRUN, "hostname": "#!/bin/sh\necho 127.0.0.1\n"}
    programs["moeflow"] = f'#!/bin/sh\nexec {sys.executable} -m moeflow.cli.main "$@"\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port, options = free_port(), tmp_path / "options"
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SRUN_OPTIONS": str(options),
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
        "MOEFLOW_TOKEN_FILE": str(tmp_path / "token"),
        "MOEFLOW_CACHE": str(tmp_path / "cache"),
        "MOEFLOW_PORT": str(port),
        "MOEFLOW_JOIN_PORT": str(free_port()),
    }
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(["bash", str(SLURM), str(tmp_path / "model")], env=environment, stdout=log, stderr=log)
    try:
        health = {}
        deadline_s = time.monotonic() + PATIENCE_S
        while health.get("num_replicas_ready") != 2:
            assert job.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.2)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as response:
                    health = json.load(response)
            except OSError:
                continue
        read_token(tmp_path / "token")  # only its owner can read it
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
        job.wait()
    assert options.read_text().split() == ["--nodes=2", "--ntasks=2", "--exclude=127.0.0.1", "--kill-on-bad-exit=0"]
    said = (tmp_path / "log").read_text()
    assert said.count("this machine has left") == 2
    assert not (tmp_path / "token").exists()

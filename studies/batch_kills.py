"""Claim: a batch job on a Ray cluster loses no request and answers none twice, whatever is killed.

    python -m studies.batch_kills --out FILE

Nodes are network namespaces of this machine (needs root): a head with the job's process, and two nodes. A random model
answers thousands of short requests in two replicas. Nodes, Ray's head and the job's process are killed at equal
distances; nodes and head start again, and the job's command is repeated. Answers must equal those of one undisturbed
process without Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from studies.harness.command import run_study
from studies.harness.ray_nodes import PORT, Node, networked, start_all
from studies.harness.records import publish
from tests.tiny_mixtral import write_tiny_mixtral

KILLS = ("a node", "the job", "the head", "a node", "head and job")
ENGINE = "moeflow.processes.main"
JOB = "moeflow.cli.main"
PATIENCE_S = 600.0


def write_input(path: Path, num_lines: int) -> None:
    """Write requests of different lengths, with random answers that their seeds determine."""
    with path.open("w") as file:
        for number in range(num_lines):
            body = {
                "prompt": f"Story {number}: once",
                "max_tokens": 200 + number % 101,
                "seed": number,
                "temperature": 1.0,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def read_answers(path: Path) -> list[tuple[str, str]]:
    """Return id and text of each result."""
    answers = []
    for line in path.read_text().splitlines():
        result = json.loads(line)
        answers.append((result["custom_id"], result["response"]["body"]["choices"][0]["text"]))
    return answers


@dataclass
class Job:
    """The command of a batch job, which may be repeated."""

    command: Sequence[str]
    output: Path
    log: Path
    num_starts: int = 0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Run the command."""
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log)

    @property
    def num_lines(self) -> int:
        """How many results are there."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def until(self, num_lines: int) -> None:
        """Wait until so many results are there. Raises: EngineError if they do not come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.num_lines < num_lines:
            if self.process.poll() not in (None, 0) or time.monotonic() > deadline_s:
                raise EngineError(f"the job does not continue: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait for its end. Raises: EngineError if it fails."""
        if self.process.wait(PATIENCE_S):
            raise EngineError(f"the job has failed: {self.log.read_text()[-2000:]}")


class Disturber:
    """Kills parts of a cluster, and starts them again."""

    def __init__(self, nodes: Sequence[Node], folder: Path, job: Job) -> None:
        self._nodes, self._folder, self._job = nodes, folder, job

    def kill(self, what: str) -> None:
        """Wait until two nodes have an engine, kill something, and start it again."""
        while sum(bool(node.pids(ENGINE)) for node in self._nodes) < 2:
            if self._job.process.poll() is not None:
                raise EngineError(
                    f"the job has ended before two nodes had an engine: {self._job.log.read_text()[-2000:]}"
                )
            time.sleep(0.1)
        kills: dict[str, Callable[[], None]] = {
            "a node": self._node,
            "the job": self._restart_job,
            "the head": self._head,
            "head and job": self._head_and_job,
        }
        kills[what]()

    def _node(self) -> None:
        """Kill all processes of a node with an engine."""
        node = next(each for each in self._nodes[1:] if each.pids(ENGINE))
        node.kill()
        node.ray_start(self._folder, self._nodes[0], num_cpus=1)

    def _head(self) -> None:
        """Kill Ray's head. Without it, Ray ends its processes on all nodes; engines continue."""
        self._nodes[0].kill("gcs_server")
        for node in self._nodes:
            node.expect("raylet", 0)
        start_all(self._nodes, self._folder)

    def _kill_job(self) -> None:
        self._nodes[0].kill(JOB)
        self._job.process.wait()

    def _restart_job(self) -> None:
        self._kill_job()
        self._job.start()

    def _head_and_job(self) -> None:
        self._kill_job()
        self._head()
        self._job.start()


def measure(nodes: Sequence[Node], folder: Path, num_lines: int) -> dict[str, Any]:
    """Run the job undisturbed in one process, then disturbed on the cluster."""
    model, source = folder / "model", folder / "in.jsonl"
    write_tiny_mixtral(model)
    write_input(source, num_lines)
    sizes = ("--threads", "1", "--kv-cache", "16MiB", "--max-num-seqs", "16")  # small, so that kills meet open requests
    shared = (sys.executable, "-m", JOB, "batch", str(source), str(model), *sizes)
    alone = Job((*shared, "-o", str(folder / "alone.jsonl")), folder / "alone.jsonl", folder / "alone.log")
    on_ray = ("--replicas", "2", "--ray-address", f"{nodes[0].address}:{PORT}")
    output = folder / "out.jsonl"
    job = Job((*nodes[0].prefix, *shared, "-o", str(output), *on_ray), output, folder / "job.log")

    begun_s = time.monotonic()
    alone.start()
    alone.finish()
    alone_s = time.monotonic() - begun_s
    disturber, events = Disturber(nodes, folder / "ray", job), []
    begun_s = time.monotonic()
    job.start()
    for number, what in enumerate(KILLS, 1):
        job.until(num_lines * number // (len(KILLS) + 3))  # the rest is for the restarts
        events.append({"what": what, "after_lines": job.num_lines})
        disturber.kill(what)
    job.finish()
    job_s = time.monotonic() - begun_s
    answers, expected = read_answers(output), read_answers(alone.output)
    return {
        "lines": num_lines,
        "answers": len(answers),
        "doubled": len(answers) - len(dict(answers)),
        "equal": len(set(answers) & set(expected)),
        "in_order": [name for name, _ in answers] == [f"line-{number}" for number in range(num_lines)],
        "kills": events,
        "starts": job.num_starts,
        "alone_s": round(alone_s, 1),
        "job_s": round(job_s, 1),
    }


def table(record: Record) -> Table:
    """Return the outcome."""
    kills = ", ".join(f"{it['what']} after {it['after_lines']}" for it in record["kills"])
    rows = (
        ("answers", f"{record['answers']} of {record['lines']}"),
        ("answered twice", str(record["doubled"])),
        ("equal to those of one process", str(record["equal"])),
        ("in the input's order", "yes" if record["in_order"] else "no"),
        ("killed", kills),
        ("starts of the job", str(record["starts"])),
        ("duration; undisturbed in one process", f"{record['job_s']} s; {record['alone_s']} s"),
    )
    return Table("A batch job on a Ray cluster whose parts are killed", ("", ""), rows)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Sequence[Node]]:
    """Run Ray on three nodes."""
    (folder / "ray").mkdir()
    with networked(3) as nodes:
        start_all(nodes, folder / "ray")
        yield nodes


@click.command(help=__doc__)
@click.option("--lines", default=10_000, show_default=True, help="Requests of the job.")
@result_options
def main(lines: int, as_json: bool, out: Path | None) -> int:
    """Run it; return 1 if an answer is missing or differs."""
    if os.geteuid() != 0:
        raise EngineError("network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name, cluster(Path(name)) as nodes:
        found = measure(nodes, Path(name), lines)
    publish("batch_kills", table, out, as_json=as_json, threads=1, **found)
    is_whole = found["answers"] == found["equal"] == lines and not found["doubled"] and found["in_order"]
    return 0 if is_whole else 1


if __name__ == "__main__":
    run_study(main)

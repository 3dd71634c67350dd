"""What a reader of the documents has: a home, an empty cache, and models and files under the names that pages use.

Models are tiny and learnt from little text, the hub is on loopback, and the machine was measured. The built-in model is
packed, so that a process starts at once. The commands are the reader's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moeflow.bench import ceilings
from moeflow.cli.main import main
from moeflow.core.hardware import Machine
from moeflow.planner import planning
from moeflow.planner.hardware import host
from moeflow.train import routing_learning
from moeflow.train.builtin import builtin_folder
from moeflow.train.predictors import learning_text
from moeflow.train.speculators import teacher_text
from tests.checkpoint.hub.hub_server import Hub
from tests.checkpoint.tiny_models import random_weights, write_gguf
from tests.documents import ROOT, documented_configuration
from tests.packed import pack_beside
from tests.planner.examples import machine
from tests.studies import running
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_tiny_mixtral
from tests.train.classifiers.toy import write_texts

MEMORY = "3GiB"  # stands for what a reader's machine may have free
PROCESS_BYTES = 300 * 2**20  # of a process that has not run tests
HUB_MODELS = ("tiny/Mixtral", "Qwen/Qwen3-30B-A3B", "OWNER/NAME")
REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4},
}


class ReadersMachine:
    """Runs command lines of `moeflow` and of studies in this process, in a folder and with a home of their own."""

    def __init__(self, folder: Path, hub: Hub, patch: pytest.MonkeyPatch) -> None:
        self.home = folder / "home"
        work = self.home / "work"
        work.mkdir(parents=True)
        patch.chdir(work)
        patch.setenv("HOME", str(self.home))
        for name in [*os.environ]:
            if name.startswith(("MOEFLOW_", "XDG_")):
                patch.delenv(name)
        patch.setattr(host, "resident_bytes", lambda _: PROCESS_BYTES)
        patch.setattr(planning, "this_machine", described)
        patch.setattr(planning, "machine_for_start", lambda _, needs, **__: described(ram_bytes=needs.ram_bytes))
        patch.setattr(ceilings, "measure_read", lambda _: 1e10)
        patch.setattr(ceilings, "measure_flops", lambda _: 1e11)
        patch.setattr(routing_learning, "NUM_TOKENS", 200)
        patch.setattr(learning_text, "ROUND_SEQUENCES", 4)
        patch.setattr(teacher_text, "ROUND_SEQUENCES", 4)
        write_models(self.home, work)
        write_files(work)
        fill(hub, self.home / "models")
        self.run("moeflow generate -p Once --max-tokens 64 --record-routing routing.trace")

    def run(self, line: str, *, stdin: str = "") -> Result:
        """Run a line like a shell: words, `~`, a comment, and files that stdin and stdout are redirected to."""
        words = [re.sub("^~(?=/)", str(self.home), word) for word in shlex.split(line, comments=True)]
        source, target = (self._taken(words, sign) for sign in "<>")
        if source:
            stdin = source.read_text(encoding="utf-8")
        if words[:2] == ["python", "-m"]:
            result = running.run(*words[2:], stdin=stdin)
        else:
            result = CliRunner().invoke(main, words[1:], input=stdin, prog_name="moeflow")
        if target:
            target.write_text(result.stdout, encoding="utf-8")
        return result

    def _taken(self, words: list[str], sign: str) -> Path | None:
        """Take a redirection out of the words; return its file."""
        if sign not in words:
            return None
        at = words.index(sign)
        file = Path(words[at + 1])
        file.parent.mkdir(parents=True, exist_ok=True)
        del words[at : at + 2]
        return file


def described(*_: object, ram_bytes: int, **__: object) -> Machine:
    """Return the stand-in for a measured machine."""
    return machine(ram=ram_bytes)


def write_models(home: Path, work: Path) -> None:
    """Write models of a few kilobytes: the built-in one, those of one's own, a dense one to upcycle."""
    first, *others = (
        builtin_folder(home / ".cache/moeflow"),
        *(home / "models" / name for name in ("olmoe", "mixtral")),
    )
    write_tiny_mixtral(first, max_position_embeddings=2048)
    for folder in (*others, work / "path/to/model"):
        shutil.copytree(first, folder)
    pack_beside(first, home / ".cache/moeflow")
    write_tiny_llama(work / "dense")
    weights = random_weights("mixtral")
    write_gguf(work / "path/to/model.gguf", "mixtral", weights, split_max_tensors=8)
    write_gguf(home / "models/mixtral.Q4_0.gguf", "mixtral", weights)


def write_files(work: Path) -> None:
    """Write texts with classes, requests, a prompt, a configuration, a described machine."""
    write_texts(work / "train.tsv", 64)
    write_texts(work / "dev.tsv", 60, seed=1)
    (work / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    (work / "prompt.txt").write_text("Once")
    (work / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "desktop.json", work / "examples")
    (work / "moeflow.toml").write_text(documented_configuration().replace("16GiB", MEMORY))


def fill(hub: Hub, models: Path) -> None:
    """Put the models under the names that pages call models on the hub."""
    for name in HUB_MODELS:
        hub.add_folder(name, models / "mixtral")
        hub.add(f"{name}-GGUF", {"model-Q4_K_M.gguf": (models / "mixtral.Q4_0.gguf").read_bytes()})

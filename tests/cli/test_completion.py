"""Completions for shells, requested as shells do: by the command in a process of its own."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from moeflow.cli.main import VERBS, main
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.tiny_mixtral import write_tiny_mixtral

ASKED = "import sys\nfrom moeflow.cli.main import main\n"
ASKED += "try: main(prog_name='moeflow')\nfinally: print(*sys.modules, file=sys.stderr)"


def complete(*words: str) -> list[str]:
    """Return bash's completions of the last word."""
    asked = {
        "_MOEFLOW_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("moeflow", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=os.environ | asked, capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "transformers", "fastapi"} & set(done.stderr.split())
    return done.stdout.splitlines()


def test_verbs_options_and_their_values_are_completed():
    assert complete("") == [f"plain,{verb}" for verb in VERBS]
    assert complete("ba") == ["plain,batch"]
    assert complete("generate", "--prompt-f") == ["plain,--prompt-file"]
    assert complete("chat", "--dtype", "bf") == ["plain,bfloat16"]
    assert complete("simulate", "pi") == ["plain,pipeline"]


def test_a_model_is_a_path_or_the_name_of_a_pulled_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write_tiny_mixtral(tmp_path / "model")
    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        assert complete("pack", "tiny/") == ["file,tiny/"]
        hub.add_folder("tiny/Mixtral", tmp_path / "model")
        assert CliRunner().invoke(main, ["pull", "tiny/Mixtral"]).exit_code == 0
        for verb in (["pack"], ["generate"], ["train", "speculator"]):
            assert complete(*verb, "tiny/M") == ["file,tiny/M", "plain,tiny/Mixtral"]


@pytest.mark.parametrize(("shell", "line"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no-")])
def test_the_script_asks_moeflow(shell, line):
    script = CliRunner().invoke(main, ["completion", shell], prog_name="moeflow").stdout
    assert f"_MOEFLOW_COMPLETE={shell}_complete" in script
    assert line in script


def test_bash_completes_with_the_script(tmp_path):
    command = tmp_path / "moeflow"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moeflow "$@"\n')
    command.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", "bash"], prog_name="moeflow").stdout
    script += "COMP_WORDS=(moeflow gen); COMP_CWORD=1\n_moeflow_completion moeflow gen moeflow\necho ${COMPREPLY[@]}"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=os.environ | path, capture_output=True, text=True, check=True)
    assert done.stdout == "generate\n", done.stderr


def test_other_shells_are_refused():
    result = CliRunner().invoke(main, ["completion", "csh"])
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr

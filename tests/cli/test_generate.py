import json
import sys
import types

import msgspec
import pytest
from click.testing import CliRunner

from moeflow.cli import generate as module
from moeflow.cli.main import main
from moeflow.core.engine_messages import EngineStats, TrialStats
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.trial import NOT_TRIED
from moeflow.engine.results import CompletionOutput, RequestOutput
from moeflow.planner.usage import Usage, requests_of
from moeflow.text.drafted_passes import DraftedPass, DraftedToken, NamedToken
from moeflow.text.token_tree_dot import to_dot
from tests.cli.terminal import terminal


class ShoutingLLM:
    """Completes a prompt with the prompt in capitals; every character is a token."""

    model = types.SimpleNamespace(name="shout", max_model_len=600)
    tokenizer = types.SimpleNamespace(
        encode=lambda text, max_tokens: list(text),
        apply_chat_template=lambda messages, max_tokens: list(messages[0]["content"]),
    )

    def __init__(self) -> None:
        self.calls: list[tuple[str, object, list[SamplingParams]]] = []
        self.usages: list[Usage] = []
        self.is_closed = False
        self.error: str | None = None
        self.counted = EngineStats()

    def stats(self) -> EngineStats:
        return self.counted

    def generate(self, prompts: list[str], sampling: list[SamplingParams], *, progress: bool) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, sampling))
        return [self._result(prompt) for prompt in prompts]

    def chat(self, conversations, sampling: list[SamplingParams], *, progress: bool) -> list[RequestOutput]:
        self.calls.append(("chat", conversations, sampling))
        return [self._result(conversation[0]["content"]) for conversation in conversations]

    def _result(self, prompt: str) -> RequestOutput:
        text = prompt.upper()
        reason = FinishReason.ERROR if self.error else FinishReason.STOP
        output = CompletionOutput(0, text, list(map(ord, text)), finish_reason=reason, error=self.error)
        return RequestOutput(prompt, list(map(ord, prompt)), [output], num_cached_tokens=1)

    def __enter__(self) -> "ShoutingLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


@pytest.fixture
def llm(monkeypatch):
    made = ShoutingLLM()
    monkeypatch.setattr(module, "load", lambda overrides, usage, **_: made.usages.append(usage) or made)
    return made


def run(*args: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["generate", *args], input=stdin)


def test_completions_go_to_stdout_and_nothing_else_does(llm):
    result = run("-p", "a", "-p", "b", "--max-tokens", "7", "--temperature", "0.5")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "[1] a\nA\n\n[2] b\nB\n", "")
    assert llm.calls == [("generate", ["a", "b"], [SamplingParams(max_tokens=7, temperature=0.5)] * 2)]
    assert llm.is_closed


def test_chat_asks_each_prompt_as_a_users_message(llm):
    assert run("-p", "a", "-p", "b", "--chat").stdout == "[1] a\nA\n\n[2] b\nB\n"
    assert llm.calls[0][:2] == ("chat", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])


@pytest.mark.parametrize("flags", [(), ("--chat",)])
def test_an_answer_is_as_long_as_the_context_allows_where_nobody_says(llm, flags):
    run("-p", "short", "-p", "x" * 590, "-p", "x" * 600, *flags)
    assert [each.max_tokens for each in llm.calls[0][2]] == [512, 10, 1]  # the engine refuses the last one


@pytest.mark.parametrize(("flags", "longest"), [((), 512), (("--max-tokens", "7"), 7)])
def test_it_is_planned_for_the_longest_answer(llm, flags, longest):
    run("-p", "abc", *flags)
    assert llm.usages == [requests_of([3], longest)]


def test_a_single_answer_stands_alone(llm):
    assert run("-p", "a").stdout == "A\n"


def test_a_long_prompt_is_cut_in_the_line_above_its_answer(llm):
    first, *_ = run("-p", "many\nwords " * 40, "-p", "b").stdout.splitlines()
    assert first.startswith("[1] many words many")
    assert first.endswith("...")
    assert len(first) <= 80


def test_prompts_come_from_files_and_stdin_too(llm, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    assert run("-p", "a", "--prompt-file", str(file), "--prompt-file", "-", stdin="c").exit_code == 0
    assert llm.calls[0][1] == ["a", "two\nlines", "c"]


def test_a_prompt_is_piped_in_where_none_is_given(llm):
    assert run(stdin="hé\nyou\n").stdout == "HÉ\nYOU\n"
    assert run("-p", "a", stdin="not read").stdout == "A\n"
    assert run(stdin="two\n\n").stdout == "TWO\n\n"
    assert [call[1] for call in llm.calls] == [["hé\nyou"], ["a"], ["two\n"]]  # as -p would have them, but for one end
    assert run(stdin="\n").exit_code == 2  # an empty prompt is none


def test_nobody_waits_for_a_prompt_at_a_terminal():
    with terminal(sys.executable, "-m", "moeflow", "generate") as session:
        assert "there is no prompt; give one with -p" in session.expect("pipe it in")


def test_no_prompt_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(module, "load", lambda overrides, **_: pytest.fail("loaded"))
    result = run()
    assert result.exit_code == 2
    assert "there is no prompt; give one with -p or --prompt-file" in result.stderr


def test_json_has_texts_tokens_usage_and_timings(llm):
    document = json.loads(run("-p", "hé", "--json").stdout)
    assert document["model"] == "shout"
    assert document["results"] == [
        {
            "prompt": "hé",
            "text": "HÉ",
            "token_ids": [72, 201],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 1},
        }
    ]
    assert set(document["timings"]) == {"load_s", "generate_s", "tokens_per_second"}


def test_stats_go_to_stderr(llm):
    result = run("-p", "abc", "--stats")
    assert result.stdout == "ABC\n"
    assert result.stderr.startswith("3 prompt tokens, 3 generated in ")
    assert "experts" not in result.stderr


def test_stats_tell_of_experts_that_come_from_disk(llm):
    llm.counted = EngineStats(
        experts_in_slots=40,
        experts_on_disk=80,
        expert_hits_total=3,
        expert_misses_total=1,
        expert_demand_bytes_total=3 * 2**20,
        expert_stall_s_total=0.25,
    )
    line = "experts: 40 of 80 in memory, 75% of those needed were there; read 3.0 MiB on demand, waited 0.25 s\n"
    assert run("-p", "abc", "--stats").stderr.endswith(line)
    llm.counted = msgspec.structs.replace(
        llm.counted, expert_prefetched_bytes_total=2**21, expert_used_bytes_total=2**20
    )
    assert "on demand, 2.0 MiB ahead (1.0 MiB of it needed), waited" in run("-p", "abc", "--stats").stderr
    trials = [TrialStats(name="drafts", reason="slower"), TrialStats(name="other", reason=NOT_TRIED)]
    llm.counted = msgspec.structs.replace(llm.counted, trials=trials)
    assert run("-p", "abc", "--stats").stderr.endswith("waited 0.25 s; drafts: slower\n")


def test_stats_tell_of_dropped_choices(llm):
    llm.counted = EngineStats(expert_choices_total=400, dropped_choices_total=30)
    assert run("-p", "abc", "--stats").stderr.endswith("7.5% of 400 choices of experts were dropped\n")


def test_stats_tell_of_experts_that_a_gpu_and_the_cpu_share(llm):
    llm.counted = EngineStats(
        experts_on_gpu=96,
        gpu_hits_total=6,
        experts_in_slots=128,
        expert_hits_total=4,
        gpu_pairs_total=30,
        cpu_pairs_total=10,
        cpu_experts_s_total=1.5,
        cpu_wait_s_total=0.25,
        expert_moves_total=7,
    )
    lines = (
        "experts        there  needed\n"
        "the GPU           96     60%\n"
        "main memory      128     40%\n"
        "the GPU computed 75% of choices; the CPU computed for 1.50 s and waited 0.25 s; 7 moved\n"
    )
    assert run("-p", "abc", "--stats").stderr.endswith(lines)
    llm.counted = msgspec.structs.replace(
        llm.counted,
        **{"experts_in_slots": 40, "experts_on_disk": 200, "expert_misses_total": 4, "expert_late_total": 1},
        **{"expert_demand_bytes_total": 3 * 2**20, "expert_stall_s_total": 0.5},
    )
    shown = run("-p", "abc", "--stats").stderr
    assert "the GPU           96     40%\nmain memory       40     27%\ndisk             200     33%\n" in shown
    assert shown.endswith("; 7 moved; 3.0 MiB were read, which took 0.50 s of it\n")


def test_a_failed_completion_is_an_exit_code(llm):
    llm.error = "the pass failed"
    result = run("-p", "a")
    assert result.exit_code == 1
    assert result.stderr == "error: the pass failed\n"


@pytest.fixture
def drafted(llm, monkeypatch):
    """The drafts for each prompt: its second letter, accepted, and a rejected alternative."""
    plain = llm._result

    def result(prompt: str) -> RequestOutput:
        found = plain(prompt)
        first, second = (NamedToken(ord(letter), letter) for letter in found.outputs[0].text[:2])
        drafted = [
            DraftedToken(second.token_id, second.token, None, ["suffix"], 0.5, True),
            DraftedToken(1, 'say "\n', 0, ["suffix"], 0.25, False),
        ]
        passes = [DraftedPass([first], 0, 0, []), DraftedPass([second], 2, 1, drafted)]
        found.outputs[0].drafted_passes = passes if llm.calls[-1][2][0].token_trees else None
        return found

    monkeypatch.setattr(llm, "_result", result)
    return llm


def test_token_trees_as_a_graph(drafted, tmp_path):
    file = tmp_path / "trees.dot"
    result = run("-p", "ab", "-p", 'the "name"', "--speculator", "suffix", "--token-trees", str(file))
    assert result.exit_code == 0, result.output
    passes = [one.outputs[0].drafted_passes for one in (drafted._result("ab"), drafted._result('the "name"'))]
    assert file.read_text(encoding="utf-8") == to_dot({"[1] ab": passes[0], '[2] the "name"': passes[1]})


def test_token_trees_as_json_lines(drafted, tmp_path):
    file = tmp_path / "trees.jsonl"
    assert run("-p", "ab", "-p", "cd", "--speculator", "suffix", "--token-trees", str(file)).exit_code == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(line["answer"], line["pass"]) for line in lines] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [token["token"] for line in lines[:2] for token in line["tokens"]] == ["A", "B"]
    assert lines[1]["drafted"][1] == {
        "token_id": 1,
        "token": 'say "\n',
        "parent": 0,
        "speculators": ["suffix"],
        "chance": 0.25,
        "is_accepted": False,
    }


def test_token_trees_need_somebody_who_drafts(drafted, tmp_path):
    result = run("-p", "ab", "--token-trees", str(tmp_path / "trees.dot"))
    assert result.exit_code == 2
    assert "--speculator suffix" in result.output
    assert not drafted.calls


def test_nobody_else_asks_for_token_trees(drafted):
    assert run("-p", "ab", "--speculator", "suffix").exit_code == 0
    assert not drafted.calls[0][2][0].token_trees


def test_trees_that_cannot_be_written_are_told_of_before_the_work(drafted, tmp_path):
    result = run("-p", "ab", "--speculator", "suffix", "--token-trees", str(tmp_path / "none" / "trees.dot"))
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert not drafted.calls

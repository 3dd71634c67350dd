from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from moeflow.cli.main import main
from moeflow.core.plan import plan_from_json
from moeflow.planner.hardware.hardware_json import machine_to_json
from tests.planner.example_plans import CONFIG
from tests.planner.examples import machine

pytestmark = pytest.mark.slow  # each plans several times


@pytest.fixture
def places(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "host.json").write_text(machine_to_json(machine(ram=2 * 10**9)))
    return str(tmp_path / "config.json"), str(tmp_path / "host.json")


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_a_plan_is_printed_with_bottleneck_and_what_would_help(places):
    config, host = places
    done = run(config, "--machine", host, "--prompt-len", "30", "--gen-len", "10")
    assert done.exit_code == 0, done.output
    for text in ("sequences at once (N)", "decode tokens/s", "peak memory", "Decoding is bound by", "What would help"):
        assert text in done.output
    assert "the machine has no GPU" in done.output
    assert "on a device" not in done.output  # no share of anything


def test_a_plan_for_a_device_shows_every_number_of_the_policy():
    done = run("mixtral-8x7b", "--machine", "paper-s1")
    assert done.exit_code == 0, done.output
    for text in ("micro-batch (mu)", "A_g", "F_g", "r_w", "r_c", "parallel layout", "cgopipe"):
        assert text in done.output
    places = [line for line in done.output.splitlines() if line.strip().startswith("experts in ")]
    places += [line for line in done.output.splitlines() if line.strip().startswith("experts on disk")]
    assert sum(float(re.search(r"([\d.]+)%", line)[1]) for line in places) == pytest.approx(100, abs=0.11)


@pytest.mark.parametrize("columns", ["80", "100"])
@pytest.mark.parametrize("machine", ["paper-s1", None])
def test_all_that_is_printed_fits_a_terminal(columns, machine, places, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    arguments = ("mixtral-8x7b", "--machine", "paper-s1") if machine else (places[0], "--machine", places[1])
    done = run(*arguments, "--batch-size", "64", "--memory", "1GB" if machine is None else "60GB")
    assert done.exit_code == 0, done.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(map(len, plain.splitlines())) <= int(columns)
    assert "…" not in plain


def test_json_is_a_plan(places):
    config, host = places
    done = run(config, "--machine", host, "--json", "--goal", "latency")
    assert plan_from_json(done.stdout, "out").forecast.policy.batch_size == 1


def test_lengths_come_from_prompts(places, tmp_path):
    config, host = places
    lines = ['"four words of text"', '{"prompt": "abcdefgh", "max_tokens": 7}', '{"turns": ["hello there"]}']
    lines += ['{"body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}}']
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines), encoding="utf-8-sig")  # as editors on Windows write it
    done = run(config, "--machine", host, "--json", "--prompts", str(prompts), "--gen-len", "4")
    made = plan_from_json(done.stdout, "out")
    assert made.workload.max_prompt_len == 5
    assert made.workload.gen_len == 6
    assert made.forecast.policy.batch_size <= 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "line 1: is no JSON"), ('{"a": 1}', "has none of prompt, messages"), ("", "has no prompts in it")],
)
def test_prompts_that_cannot_be_read_are_named(places, tmp_path, line, complaint):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    done = run(places[0], "--machine", places[1], "--prompts", str(prompts))
    assert done.exit_code == 2
    assert complaint in done.output


def test_pictures_are_drawn(places, tmp_path):
    config, host = places
    roofs, policies = tmp_path / "new" / "roofs.png", tmp_path / "map.png"
    done = run(config, "--machine", host, "--batch-size", "2", "--roofline", str(roofs), "--policy-map", str(policies))
    assert done.exit_code == 0, done.output
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (roofs, policies))


def test_what_does_not_fit_says_what_is_missing(places):
    done = run(places[0], "--machine", places[1], "--memory", "1MiB")
    assert done.exit_code == 2
    assert "needs at least" in done.output
    assert "allowed). Take shorter" in done.output


def test_an_unknown_machine_is_answered(places):
    done = run(places[0], "--machine", "papers1")
    assert done.exit_code == 2
    assert "did you mean 'paper-s1'" in done.output


@pytest.mark.parametrize("rate", ["nan", "inf", "1e300"])
def test_a_rate_that_is_none_is_refused(places, rate):
    config, host = places
    done = run(config, "--machine", host, "--rate", rate)
    assert done.exit_code == 2
    assert "make no traffic to measure: say a rate from" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--prompt-len", "2000", "--gen-len", "100"), "2100 in total, but"),
        (("--gen-len", "99999999"), "was made for 2048 at most. Plan for shorter prompts"),
        (("--prompt-len", "0"), "0 is not in the range"),
        (("--batch-size", "100000000"), "is not in the range 1<=x<=32768"),
        (("--threads", "100000"), "needs 100000 threads, but this machine has"),
        (("--prompts", "{long}"), "A prompt of 5000 tokens"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(places, tmp_path, arguments, complaint):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 20_000}))
    done = run(places[0], "--machine", places[1], *(it.format(long=long) for it in arguments))
    assert done.exit_code == 2
    assert complaint.lower() in " ".join(done.output.split()).lower()


def test_ranks_and_replicas_are_planned_for_a_described_host(tmp_path):
    host = tmp_path / "host.json"
    host.write_text(machine_to_json(machine(ram=10**11)))
    asked = ("mixtral-8x7b", "--machine", str(host), "--quantize", "int4", "--batch-size", "2")
    made = {}
    for more in ((), ("--ranks", "2"), ("--replicas", "2"), ("--ranks", "2", "--expert-layout", "sliced")):
        done = run(*asked, *more, "--json")
        assert done.exit_code == 0, done.output
        made[more] = plan_from_json(done.stdout, "printed")
    alone, ranks, replicas, sliced = made.values()
    assert alone.config.parallel is None
    assert (ranks.config.parallel.num_ranks, replicas.num_replicas) == (2, 2)
    assert "layouts of ranks" in dict(ranks.reasons)
    assert sliced.config.parallel.expert_layout == "sliced"
    assert replicas.forecast.memory[0].peak_bytes.value > 1.9 * alone.forecast.memory[0].peak_bytes.value
    assert "an engine more (--replicas 3)" in {it.change for it in replicas.forecast.helps}
    shown = run(*asked, "--ranks", "2").output
    assert "layouts of ranks" in shown
    assert "4 ranks on this machine" in shown


def test_processes_that_cannot_be_planned_for_are_refused():
    assert "one engine; remove --replicas" in run("--validate", "--replicas", "2").output
    asked = ("mixtral-8x7b", "--machine", "l4", "--ranks", "2")
    assert "2 ranks (--ranks) on GPUs need one each, but 1 GPU is" in run(*asked, "--device", "cuda").output
    assert run(*asked).exit_code == 0  # its host computes

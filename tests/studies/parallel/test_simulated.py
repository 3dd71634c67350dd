"""`python -m studies.parallel.simulated` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moeflow.parallel.placement.layouts import LAYOUTS
from tests.studies import running


def run(model, *args, machine="h100"):
    return running.run("studies.parallel.simulated", "--machine", machine, "--model", model, *args)


def objects(done) -> dict[str, dict]:
    assert done.exit_code == 0, done.output
    return {one["layout"]: one for one in map(json.loads, done.stdout.splitlines())}


def test_help_has_examples_and_explains_the_layouts():
    shown = running.run("studies.parallel.simulated", "--help").output
    assert re.search(r"Examples:\n(.*\n)? +python -m studies.parallel.simulated", shown)
    assert all(f"{name} " in " ".join(shown.split()) for name in LAYOUTS)
    assert "mixtral-8x22b" in shown


def test_a_table_has_every_layout(model):
    done = run(model, "--ranks", "8", "--link", "100GB", "--tokens", "2000", "--capacity-factor", "1.5")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().split(" ")[0] in LAYOUTS]
    assert [row[0] for row in rows] == list(LAYOUTS)
    assert "2,000 tokens on 8 x h100, bfloat16" in done.stdout
    assert "whose factor is 1.5" in done.stdout
    capacity = rows[list(LAYOUTS).index("capacity")]
    assert capacity[3:5] == ["1.00", "1.00"]
    assert float(capacity[-1].rstrip("%")) > 10
    assert all(row[-1] == "0.0%" for row in rows if row is not capacity)


def test_json_has_one_object_a_layout(model):
    args = ("--ranks", "4", "--skew", "1", "--json", "--layout", "sliced", "--layout", "expert", "--layout", "sliced")
    both = objects(run(model, *args))
    assert list(both) == ["sliced", "expert"]
    for one in both.values():
        assert one["seconds"] == pytest.approx(sum(section["max_s"] for section in one["sections"].values()))
        works = sum(section["mean_s"] for section in one["sections"].values())
        assert one["idle_mean_s"] == pytest.approx(one["seconds"] - works)
        assert one["fits"]
    assert both["sliced"]["work_max_over_mean"] == 1
    assert both["expert"]["work_max_over_mean"] > 2
    assert both["sliced"]["experts_bytes"] == both["expert"]["experts_bytes"] == 4 * 2 * 2 * 3 * 1024 * 2048
    assert both["sliced"]["speed_up"] > both["expert"]["speed_up"] > 0


def test_the_layout_by_formula_is_said_and_marked(model):
    args = ("--ranks", "4", "--tokens", "300", "--link", "450GB")
    shown = run(model, *args)
    objects_of = objects(run(model, *args, "--json"))
    by_formula = {name: one["by_formula"] for name, one in objects_of.items()}
    assert by_formula.pop("capacity") is by_formula.pop("capacity-dropless") is None
    (chosen,) = (name for name, one in by_formula.items() if one["is_chosen"])
    assert f"By formula: {chosen}: " in shown.stdout
    seconds = sorted(one["seconds"] for one in by_formula.values())
    assert by_formula[chosen]["seconds"] == seconds[0]
    assert objects_of["sliced"]["seconds"] == pytest.approx(by_formula["sliced"]["seconds"], rel=0.3)
    assert by_formula["sliced"]["seconds_on_twice_the_ranks"] < by_formula["sliced"]["seconds"]


def test_nothing_is_chosen_where_nothing_fits():
    args = ("mixtral-8x22b", "--ranks", "2", "--layout", "sliced")
    assert "By formula: no layout fits: a rank needs 126.0 GiB at least and has 74.5 GiB" in run(*args).stdout
    assert not objects(run(*args, "--json"))["sliced"]["by_formula"]["is_chosen"]


def test_a_faster_link_and_another_seed_matter(model):
    args = ("--ranks", "4", "--json", "--layout", "expert")
    slow, fast = (objects(run(model, *args, *more))["expert"] for more in ((), ("--link", "400GB")))
    other = objects(run(model, *args, "--seed", "7"))["expert"]
    assert slow["sections"]["dispatch"]["max_s"] > 4 * fast["sections"]["dispatch"]["max_s"]
    assert slow["sections"]["experts"] == fast["sections"]["experts"]
    assert slow["seconds"] != other["seconds"]


def test_hot_experts_are_a_tenth_or_as_many_as_said(model):
    args = ("--ranks", "4", "--json", "--layout", "expert", "--skew", "1")
    one, two = (objects(run(model, *args, *more))["expert"] for more in ((), ("--skew-experts", "1")))
    assert one == two
    assert objects(run(model, *args, "--skew-experts", "8"))["expert"]["work_max_over_mean"] < 1.1


def test_many_experts_have_the_studys_defaults(model, tmp_path):
    file = tmp_path / "many.json"
    file.write_text(json.dumps(json.loads(Path(model).read_text()) | {"num_local_experts": 128}))
    args = (str(file), "--json", "--layout", "expert", "--layout", "capacity")
    by_default, spelt_out = objects(run(*args)), objects(run(*args, "--skew-experts", "12", "--capacity-factor", "50"))
    assert by_default == spelt_out
    assert objects(run(model, "--json"))["capacity"]["capacity_factor"] == 8


@pytest.mark.thorough
def test_thousands_of_ranks_and_a_machine_without_devices(model, tmp_path):
    assert len(objects(run(model, "--ranks", "1024", "--tokens", "20000", "--json"))) == len(LAYOUTS)
    host = {
        "name": "host",
        "levels": [
            {
                "name": "ram",
                "capacity_bytes": "1GiB",
                "read_bytes_per_s": 1e10,
                "processor": {"name": "cpu", "peak_flops_per_s": {"float32": 1e11}},
            }
        ],
    }
    file = tmp_path / "host.json"
    file.write_text(json.dumps(host))
    assert (
        objects(run(model, "--json", machine=str(file)))["replicated"]["experts_bytes"] == 4 * 8 * 2 * 3 * 1024 * 2048
    )


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--skew", "nan"), "give a number from 0 to 1"),
        (("--skew-experts", "9"), "9 of 8 experts cannot be hot"),
        (("--capacity-factor", "inf"), "--capacity-factor inf makes no sense"),
        (("--link", "fast"), "'fast' is not a size"),
    ],
)
def test_what_makes_no_sense_is_refused(model, args, complaint):
    done = run(model, *args)
    assert done.exit_code == 2
    assert complaint in " ".join(done.output.split())


def test_a_model_without_experts_is_refused(tmp_path):
    dense = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64}
    dense |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dense))
    done = run(str(file))
    assert done.exit_code == 2
    assert "has no experts" in done.output


def test_what_does_not_fit_is_marked():
    done = run("mixtral-8x7b", "--ranks", "8", "--layout", "replicated", "--layout", "sliced")
    assert "84.0 GiB (!)" in done.stdout
    assert "10.5 GiB (!)" not in done.stdout
    assert "(!): more than a rank has (74.5 GiB)" in done.stdout


def test_sections_are_drawn(model, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sections.png"
    done = run(model, "--ranks", "8", "--tokens", "500", "--plot", str(file))
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")

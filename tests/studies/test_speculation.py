"""The study of speculation: chains and trees against brute force, and the figures by hand."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError, EngineError
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.speculation.draft_tree import DraftNode
from studies.speculation.arms import FixedSize, Size, best_chain, make_arms
from studies.speculation.prompts import Prompt
from studies.speculation.run import Answer, SpeculationRun, set_fields
from studies.speculation.tables import speculation_tables
from tests.speculation.test_governor import make_request
from tests.studies import running
from tests.tiny_mixtral import write_tiny_mixtral


@st.composite
def drafted_trees(draw) -> DraftNode:
    nodes = [DraftNode(-1, None, chance=1.0)]
    for token_id in range(draw(st.integers(0, 10))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        token = DraftNode(token_id, parent, chance=parent.chance * draw(st.sampled_from([0.25, 0.5, 0.75])))
        parent.children[token_id] = token
        nodes.append(token)
    return nodes[0]


def descendants(token: DraftNode) -> list[DraftNode]:
    return [below for child in token.children.values() for below in (child, *descendants(child))]


def is_chain(tokens) -> bool:
    return all(after.parent is before for before, after in itertools.pairwise(tokens))


@given(drafted_trees(), st.integers(0, 5))
def test_the_best_chain_is_that_of_most_expected_tokens(root, num_tokens):
    expected, chain = best_chain(root, num_tokens)
    assert len(chain) <= num_tokens
    assert not chain or (chain[0].parent is root and is_chain(chain))
    paths = []
    for token in descendants(root):
        path = [token]
        while path[0].parent is not root:
            path.insert(0, path[0].parent)
        paths.append(path[:num_tokens])
    best = max((sum(token.chance for token in path) for path in paths), default=0.0)
    assert sum(token.chance for token in chain) == pytest.approx(best)
    assert expected == pytest.approx(best)


@given(drafted_trees(), st.integers(1, 6))
def test_trees_are_the_likeliest_subtrees_of_that_size(root, num_tokens):
    request = make_request()
    governor = FixedSize(Size(num_tokens, is_chain=False))
    assert governor.choose({request: root}, 1, 63) == []  # what a pass takes without drafts is not known yet
    governor.note(1, 0, 0, 1.0)
    chosen = [token for _, token in governor.choose({request: root}, 1, 63)]
    every = descendants(root)
    assert len(chosen) == min(num_tokens, len(every))
    assert all(token.parent is root or token.parent in chosen for token in chosen)
    subtrees = (
        sum(token.chance for token in some)
        for some in itertools.combinations(every, len(chosen))
        if all(token.parent is root or token.parent in some for token in some)
    )
    assert sum(token.chance for token in chosen) == pytest.approx(max(subtrees))


def test_figures_of_a_set():
    """Two prompts of 10 tokens after the first: 2 s without drafts, 1 s and 4 s with."""
    plain = Answer(list(range(11)), 0.2, 10, 0, 0, 0)
    fast, slow = Answer(plain.token_ids, 0.1, 4, 3, 9, 6), Answer(plain.token_ids, 0.4, 10, 2, 5, 0)
    found = set_fields("some", [(plain, fast), (plain, slow)])
    assert found["plain_tokens_per_s"] == pytest.approx(5.0)
    assert found["tokens_per_s"] == pytest.approx(4.0)
    assert found["speedup"] == pytest.approx(0.8)
    assert (found["speedup_low"], found["speedup_median"], found["speedup_high"]) == pytest.approx((0.5, 1.25, 2.0))
    assert (found["passes"], found["drafting_passes"], found["drafted"], found["accepted"]) == (14, 5, 14, 6)
    assert found["tokens_per_pass"] == pytest.approx(20 / 14)
    with pytest.raises(EngineError, match="two tokens"):
        set_fields("short", [(Answer([1], 0.0, 0, 0, 0, 0), Answer([1], 0.0, 0, 0, 0, 0))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(folder):
    settings = Settings(
        model=folder, num_threads=1, max_num_seqs=1, max_model_len=256, dtype="float32", speculators=POOL
    )
    return resolve(settings).config


POOL = ("suffix", "early-exit")


def test_every_speculator_alone_all_together_and_both_shapes(config):
    prompts = [Prompt("one", [5, 6, 7, 8] * 8), Prompt("one", [9, 10] * 6), Prompt("two", [30, 40, 50])]
    steps = []
    with SpeculationRun(config, new_tokens=48, temperature=0.0, sizes=(3,)) as run:
        arms = run.answer(prompts, 2, lambda: steps.append(1))
        assert len(run.names) * len(prompts) * 2 == len(steps)
    first, second, both, tree, chain = arms
    assert first["speculators"] == ["suffix"]
    assert second["speculators"] == [second["name"]]
    assert both["speculators"] == ["suffix", second["name"]]
    assert [(arm["size"], arm["is_chain"]) for arm in arms] == [(None, False)] * 3 + [(3, False), (3, True)]
    for arm in arms:
        assert [one["set"] for one in arm["sets"]] == ["one", "two"]
        assert [one["speculator"] for one in arm["acceptance"]] == arm["speculators"]
        drafted = sum(one["drafted"] for one in arm["sets"])
        assert drafted >= max(sum(one["drafted"]) for one in arm["acceptance"])
        assert sum(arm["trees"]) == sum(one["drafting_passes"] for one in arm["sets"])
        assert sum(at * number for at, number in enumerate(arm["trees"])) == sum(one["accepted"] for one in arm["sets"])
    for arm in (tree, chain):
        assert sum(one["drafted"] for one in arm["sets"]) <= 3 * sum(arm["trees"])
        assert sum(arm["trees"]) > 10
    model = {"record": "x"} | {"model": "tiny", "weight_format": "float32", "arms": arms}
    speed, depths, shapes = speculation_tables(model)
    assert len(speed.rows) == 2 * 3
    assert [row[0] for row in depths.rows] == [
        "suffix",
        second["name"],
        *(f"{one}, of all together" for one in both["speculators"]),
    ]
    assert [row[0] for row in shapes.rows] == ["one", "two", "all sets"]


def test_pools_are_the_first_speculators_and_have_rows_of_their_own(config):
    with SpeculationRun(config, new_tokens=24, temperature=0.0, sizes=(3,), pools=(1, 2)) as run:
        arms = run.answer([Prompt("one", [5, 6, 7, 8] * 8)], 1, lambda: None)
    shaped = [arm for arm in arms if arm["size"] is not None]
    assert [(arm["name"], len(arm["speculators"])) for arm in shaped] == [
        ("tree of 3 by 1", 1),
        ("chain of 3 by 1", 1),
        ("tree of 3", 2),
        ("chain of 3", 2),
    ]
    assert shaped[0]["speculators"] == ["suffix"]
    *_, shapes = speculation_tables({"record": "x", "model": "tiny", "weight_format": "float32", "arms": arms})
    assert [row[:3] for row in shapes.rows] == [
        (name, number, "3") for number in ("1", "2") for name in ("one", "all sets")
    ]
    assert shapes.rows[0][3:] != shapes.rows[2][3:]


def test_chains_are_chains(config):
    """This covers the computed trees, not the chosen ones: every tree of the arm has one branch."""
    with SpeculationRun(config, new_tokens=32, temperature=0.0, sizes=(4,)) as run:
        shapes: dict[str, list[bool]] = {}
        for arm in run._arms:
            arm.engine._on_pass = lambda batch, name=arm.name: shapes.setdefault(name, []).extend(
                list(entry.tree.parents) == list(range(-1, len(entry.tree) - 1))
                for entry in batch.entries
                if entry.tree
            )
        run.answers(Prompt("one", [5, 6, 7, 8] * 8), 0, 0)
    assert all(shapes["chain of 4"])
    assert not all(shapes["tree of 4"])


def test_a_round_knows_nothing_of_the_one_before(config):
    """Else the second answer to a prompt would be drafted from the first."""
    with SpeculationRun(config, new_tokens=40, temperature=0.0) as run:
        prompt = Prompt("one", list(range(40, 60)))
        arm = run._arms[run.names.index("suffix")]
        drafted = []
        for _ in range(2):
            run.begin_round()
            drafted.append(len(arm._speculators[0]._shared._places))
            run.answers(prompt, 0, 0)
        assert len(arm._speculators[0]._shared._places) > 0
        assert drafted == [0, 0]


def test_one_speculator_has_one_row(config):
    from dataclasses import replace

    from moeflow.engine.runner_loading import load_runner

    alone = replace(config, speculators=("suffix",), draft_models=())
    runner = load_runner(alone)
    try:
        assert [arm.name for arm in make_arms(alone, runner, ())] == ["none", "suffix"]
    finally:
        runner.close()


def test_prompts_in_another_form_are_refused(tmp_path):
    from studies.speculation.prompts import read_prompts

    for text in ("[]", "{}", '{"a": []}', '{"a": [""]}', "{"):
        (file := tmp_path / "prompts.json").write_text(text)
        with pytest.raises(ConfigError):
            read_prompts(file, "nowhere")


def test_speculation_is_measured_on_the_same_answers(folder, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"again": ["ab ab ab ab ab", "cd cd cd"], "once": ["xyz"]}))
    out = tmp_path / "results.jsonl"
    some = ("--threads", "1", "--prompts", str(prompts), "--new-tokens", "8", "--temperature", "1", "--out", str(out))
    picture = tmp_path / "speed.png"
    wishes = ("--speculator", "suffix", "--compare-chains", "2", "--plot", str(picture))
    done = running.run("studies.speculation", folder, *wishes, *some)
    assert done.exit_code == 0, done.output
    assert "again" in done.stdout
    assert "Trees against the best single chain" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(out.read_text())
    assert [arm["name"] for arm in record["arms"]] == ["suffix", "tree of 2", "chain of 2"]
    for arm in record["arms"]:
        assert [(one["set"], one["num_answers"]) for one in arm["sets"]] == [("again", 2), ("once", 1)]
        for one in arm["sets"]:
            assert one["tokens_per_pass"] == pytest.approx(1 + one["accepted"] / one["passes"])
            assert one["speedup"] == pytest.approx(one["tokens_per_s"] / one["plain_tokens_per_s"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--speculator suffix"),
        (("--speculator", "oracle"), "'oracle' is unknown, and there is no such file. Name suffix"),
    ],
)
def test_speculation_needs_a_speculator_that_there_is(folder, arguments, message):
    done = running.run("studies.speculation", folder, *arguments)
    assert done.exit_code != 0
    assert message in done.stderr

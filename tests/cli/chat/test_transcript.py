import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.cli.chat.transcript import Transcript, load, save
from moeflow.core.errors import RequestError


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": it} for number, it in enumerate(contents)]


TEXTS = st.lists(
    st.sampled_from(["<!-- moeflow: user -->", "\\<!-- moeflow: x", "**You:**", "", "# a", "text \\", "\u2028é"]),
    min_size=1,
).map("\n".join)


@pytest.mark.parametrize("name", ["a.md", "a.json"])
@given(
    contents=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    system=st.none() | TEXTS.filter(bool),
    model=st.sampled_from([None, "OLMoE-1B-7B", "a name --> with <!-- moeflow: user -->"]),
)
def test_every_text_comes_back(tmp_path_factory, name, contents, system, model):
    file = tmp_path_factory.getbasetemp() / name
    file.unlink(missing_ok=True)
    whole = Transcript(system, turns(*(text for pair in contents for text in pair)), model)
    save(file, whole)
    assert load(file) == whole


def test_markdown_is_as_the_page_writes_it(tmp_path):
    save(tmp_path / "a.md", Transcript(None, turns("one?", "1"), "olmoe"))
    expected = "# one?\n\n<!-- moeflow: model olmoe -->\n\n<!-- moeflow: user -->\n**You:**\n\none?\n\n"
    expected += "<!-- moeflow: assistant -->\n**Answer:**\n\n1\n"
    assert (tmp_path / "a.md").read_text() == expected


def exported(messages: list[tuple[str, str, str]], chosen: dict[str, str], updated: int) -> dict[str, object]:
    """A record of the page's: messages of an id, its parent's and a text."""
    tree = [
        {"id": it, "parent": parent, "role": "user" if it[0] == "q" else "assistant", "content": text}
        for it, parent, text in messages
    ]
    return {"id": "c", "title": "t", "updatedAt": updated, "savedAt": 0, "chosen": chosen, "messages": tree}


def write_export(file: Path, *records: dict[str, object]) -> Path:
    file.write_text(json.dumps({"format": "moeflow-conversations", "version": 1, "conversations": records}))
    return file


def test_of_an_export_the_versions_that_are_shown_are_read(tmp_path):
    tree = [("q1", "", "one?"), ("a1", "q1", "1"), ("a2", "q1", "one"), ("a3", "q1", "I"), ("q2", "a2", "two?")]
    old = exported([("q1", "", "old?"), ("a1", "q1", "old")], {}, 5)
    file = write_export(tmp_path / "a.json", exported(tree, {"q1": "a2"}, 7), old)
    assert load(file).turns == turns("one?", "one"), "a question that nobody answered is left out"
    assert load(write_export(file, exported(tree, {}, 7), old)).turns == turns("one?", "I")


def test_attached_files_are_sent_as_the_page_sends_them(tmp_path):
    record = exported([("q1", "", "why?"), ("a1", "q1", "so")], {}, 1)
    record["messages"][0]["files"] = [{"name": "a.md", "text": "```\nx\n```\n"}]
    found = load(write_export(tmp_path / "a.json", record))
    assert found.turns[0]["content"] == "File a.md:\n````\n```\nx\n```\n````\n\nwhy?"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "no conversation"),
        ("{}", "no conversation"),
        ('{"format": "moeflow-conversations", "version": 2}', "version 2"),
        ('{"format": "moeflow-conversations", "version": 1, "conversations": []}', "cannot be read"),
        ('{"format": "moeflow-conversations", "version": 1, "conversations": [{"messages": []}]}', "no messages"),
        ('{"format": "moeflow-conversations", "version": 1, "conversations": [{"messages": [{}]}]}', "cannot be read"),
    ],
)
def test_other_json_is_refused(tmp_path, text, complaint):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RequestError, match=complaint):
        load(tmp_path / "a.json")


def test_a_loop_of_messages_ends(tmp_path):
    record = exported([("q1", "", "one?"), ("a1", "q1", "1"), ("q1", "a1", "one?")], {}, 1)
    assert load(write_export(tmp_path / "a.json", record)).turns == turns("one?", "1")

"""Texts of the page are found, so that no language lacks one unnoticed."""

from __future__ import annotations

import pytest

from scripts.page_texts import dictionaries, differences, page_texts, script_texts

SOURCE = """
  show(tr("plain"), tr(isOne ? "one (\\"quoted\\")" : "{count} of, many", { count: f("no text") }));
  setText(it, kind === "all" ? tr(state === "later" ? "Later" : "Now") : str("no call of tr"));
  const TITLES = { open: textKey("Open") }; // for tr(title)
  return tr(title);
"""


def test_texts_are_found_in_calls():
    texts, variable = script_texts(SOURCE)
    assert texts == {"plain", 'one ("quoted")', "{count} of, many", "Later", "Now", "Open"}
    assert variable == ["title", "title"]


def test_texts_of_the_page_are_found():
    texts, variable = page_texts()
    assert {"What would you like to ask?", "Write a message", "Attached files", "Experts", "Nothing found."} <= texts
    assert not {"moeflow", "This page needs JavaScript. The same model answers at"} & texts
    assert "inspect/inspector.js: tr(title)" in variable  # marked elsewhere


def test_each_difference_is_named():
    assert differences({"a", "b {n}"}, {"b {n}": "B", "c": "C"}) == [
        'missing: "a"',
        'unused: "c"',
        'values differ: "b {n}"',
    ]


@pytest.mark.parametrize("language", ["de", "fr", "ja", "zh"])
def test_every_language_has_every_text(language):
    assert differences(page_texts()[0], dictionaries()[language]) == []

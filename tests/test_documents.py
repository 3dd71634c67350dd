"""What the documents name is there: links and their headings, verbs and options, scripts, variables, metrics, codes.

The log is left out: it describes the past.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import click
import pytest

from moeflow.cli.main import main
from tests.documents import PAGES, RESULTS, ROOT, commands_in, page_name, without_blocks

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def heading_names(text: str) -> set[str]:
    """Return the anchors of a page as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def without_links(text: str) -> str:
    """Return a page without the targets of links."""
    return LINK.sub("", text)


def broken_links(file: Path, text: str) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (file.parent / path) if path else file
        if not page.exists() or (anchor and anchor not in heading_names(page.read_text(encoding="utf-8"))):
            found.append(target)
    return found


@cache
def source_code() -> str:
    """Return the text of all modules."""
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "moeflow").rglob("*.py"))


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """Return the options of every command, by its words behind `moeflow`."""
    found: dict[tuple[str, ...], set[str]] = {}

    def visit(words: tuple[str, ...], command: click.Command) -> None:
        found[words] = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        found[words] |= {"--help", "-h"}
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                visit((*words, name), child)

    visit((), main)
    return found


def unknown_in(line: str) -> list[str]:
    """Return the verbs and options in a line of code that moeflow does not have."""
    found = []
    for call in re.findall(r"^(?:\S*/)?moeflow( [^|;&#]+)", line):
        words, options = (), set()
        for word in call.split():
            if word.startswith("-"):
                options.add(word.partition("=")[0].rstrip(",.)"))
            elif (*words, word) in commands() and not options - commands()[()]:
                words = (*words, word)
            elif not words and re.fullmatch(r"[a-z]{3,}", word):
                found.append(f"moeflow {word}")
        known = commands()[words] | commands()[()]
        found += [
            f"moeflow {' '.join(words)} {name}" for name in options if name.startswith("--") and name not in known
        ]
    return found


def options_alone(line: str) -> list[str]:
    """Return options that stand by themselves, like --memory SIZE: some command should have each."""
    return re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", line) if line.startswith("--") else []


@pytest.mark.parametrize("file", [*PAGES, RESULTS], ids=page_name)
def test_links_lead_somewhere(file):
    assert broken_links(file, file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", PAGES, ids=page_name)
def test_verbs_and_options_are_there(file):
    lines = commands_in(file.read_text(encoding="utf-8"))
    assert [name for line in lines for name in unknown_in(line)] == []
    known = set().union(*commands().values())
    assert [name for line in lines for name in options_alone(line) if name not in known] == []


@pytest.mark.parametrize("file", PAGES, ids=page_name)
def test_scripts_and_tests_are_there(file):
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"(?<![\w/])((?:studies|scripts|tests|examples)/[\w./-]+)", without_links(text))
    names += [name.replace(".", "/") for name in re.findall(r"(?<=-m )studies[\w.]+", text)]
    assert [name for name in names if not any(ROOT.glob(f"{name.rstrip('.')}*"))] == []


@pytest.mark.parametrize("file", PAGES, ids=page_name)
def test_variables_metrics_and_codes_are_there(file):
    text = file.read_text(encoding="utf-8")
    source = source_code()
    assert [name for name in set(re.findall(r"\bMOEFLOW_[A-Z_]+", text)) if name not in source] == []
    metrics = {name.removesuffix("_total") for name in re.findall(r"`(moeflow_\w+)", text)}
    assert [name for name in metrics if name not in source] == []
    codes = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| \d{3}[^|]*\|([^|]*)\|", text, re.MULTILINE)))
    assert [name for name in codes if f'"{name}"' not in source] == []


def longest_paragraph(text: str) -> int:
    """Return the words of the longest paragraph or list item; tables and headings have none."""
    lines = [line if re.match(r"[^|<#!]", line) else "" for line in without_blocks(text).splitlines()]
    blocks = re.split(r"\n\s*\n|\n(?=[-*] )", "\n".join(lines))
    return max(len(re.sub(r"`[^`]*`", "code", block).split()) for block in blocks)


@pytest.mark.parametrize("file", [page for page in PAGES if page.name != "benchmarks.md"], ids=page_name)
def test_paragraphs_are_short(file):
    assert longest_paragraph(file.read_text(encoding="utf-8")) <= 80


def test_summaries_are_short():
    readme, changes = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md"))
    assert readme.count("\n") <= 120
    assert changes.partition("## [Unreleased]")[2].partition("\n## ")[0].count("\n") <= 60
    log = (ROOT / "docs" / "studies" / "log.md").read_text(encoding="utf-8")
    assert max(entry.count("\n") for entry in log.split("\n## ")) <= 60


def test_what_is_not_there_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One: two, `three`\n```\n# no heading\n```\n")
    text = "[a](page.md#one-two-three) [b](page.md#four) [c](none.md) [d](https://x.y/z) [e](page.md#no-heading)"
    assert broken_links(page, text) == ["page.md#four", "none.md", "page.md#no-heading"]
    assert unknown_in(".venv/bin/moeflow generate -p hi --max-token 3") == ["moeflow generate --max-token"]
    assert unknown_in("moeflow serv") == ["moeflow serv"]
    assert unknown_in("moeflow --debug bench serve --rate 2 | grep --count x") == []
    assert unknown_in("moeflow bench serve --rat 2") == ["moeflow bench serve --rat"]
    assert longest_paragraph("# Five words of a heading\n\n- one `two three`\n- one two three\n\n| a b c d |\n") == 4
    assert options_alone("--memory SIZE, --nothing") == ["--memory", "--nothing"]
    assert commands_in("a `b c`\n```sh\nd \\\n  e\n```\n```\n$ f\nprinted\n```\n") == ["d    e", "f", "b c"]

"""The graph has every token once, with its description, for any tokens: read back by a grammar of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflow.text.drafted_passes import DraftedPass, DraftedToken, NamedToken
from moeflow.text.token_tree_dot import to_dot, visible

# Of DOT's grammar what there is to be: statements in braces, identifiers, quoted strings, attributes.
TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_][A-Za-z_0-9]*|[0-9.]+)|(?P<sign>->|[{}\[\]=;,]))'
)


class Graph:
    """Nodes with their attributes and edges, as another program would read them."""

    def __init__(self, source: str) -> None:
        self.nodes: dict[str, dict[str, str]] = {}
        self.edges: list[tuple[str, str]] = []
        self.frames: list[str] = []
        self.tokens = self._scan(source)
        assert self.take() == "digraph"
        self.take()
        self._statements()
        assert not self.tokens

    @staticmethod
    def _scan(source: str) -> list[str]:
        found, at = [], 0
        while source[at:].strip():
            match = TOKEN.match(source, at)
            assert match, source[at : at + 40]
            found.append(match[match.lastgroup])
            at = match.end()
        return found[::-1]

    def take(self, *wanted: str) -> str:
        token = self.tokens.pop()
        assert not wanted or token in wanted, (token, wanted)
        return token

    def _statements(self) -> None:
        self.take("{")
        while self.tokens[-1] != "}":
            name = self.take()
            if name == "subgraph":
                self.take()
                self._statements()
                continue
            if self.tokens[-1] == "=":
                self.take("=")
                value = self.take()
                if name == "label":
                    self.frames.append(value)
            elif self.tokens[-1] == "->":
                self.take("->")
                self.edges.append((name, self.take()))
                self._attributes()
            else:
                attributes = self._attributes()
                if name not in ("node", "edge"):
                    assert name not in self.nodes, "twice"
                    self.nodes[name] = attributes
            self.take(";")
        self.take("}")

    def _attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.tokens[-1] != "[":
            return found
        while self.take("[", ",", "]") != "]":
            name = self.take()
            self.take("=")
            found[name] = self.take()
            if self.tokens[-1] == "]":
                self.take("]")
                break
        return found

    def label(self, name: str) -> list[str]:
        """The lines that a node shows."""
        text = self.nodes[name]["label"][1:-1]
        return [re.sub(r"\\(.)", r"\1", line) for line in re.split(r"(?<!\\)(?:\\\\)*\\n", text)] if text else [""]


texts = st.sampled_from(
    ['"', "\\", "\n", "\\n", '\\"', "<|im_end|>", "<b>", "]", ";", "\x00", "\u202e", "é", "🦊", " the"]
)
texts |= st.text(max_size=6)


@st.composite
def passes(draw) -> DraftedPass:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 8)))]
    accepted: list[int] = []
    while choices := [node for node, parent in enumerate(parents) if parent == (accepted[-1] if accepted else -1)]:
        if not draw(st.booleans()):
            break
        accepted.append(draw(st.sampled_from(choices)))
    drafted = [
        DraftedToken(node, draw(texts), None if parent < 0 else parent, ["a", "b"], 0.125, node in accepted)
        for node, parent in enumerate(parents)
    ]
    own = NamedToken(99, draw(texts))
    path = [NamedToken(node, drafted[node].token) for node in accepted]
    return DraftedPass([*path, own], len(drafted), len(accepted), drafted)


@given(st.dictionaries(texts, st.lists(passes(), max_size=4), max_size=3))
def test_every_token_is_drawn_once_and_the_answers_are_paths(answers):
    source = to_dot(answers)
    graph = Graph(source)
    every = [one for found in answers.values() for one in found]
    assert len(graph.nodes) == len(answers) + sum(
        len(one.drafted) + len(one.tokens) - one.num_accepted for one in every
    )
    assert len(graph.edges) == len(graph.nodes) - len(answers)
    assert all(start in graph.nodes and end in graph.nodes for start, end in graph.edges)
    assert len({end for _, end in graph.edges}) == len(graph.edges)  # trees: each has one parent
    assert len(graph.frames) == sum(one.num_drafted > 0 for one in every)
    for number, (name, found) in enumerate(answers.items()):
        at = f"a{number}"
        shown = graph.nodes[at]["label"][1:-1]
        assert re.sub(r"\\(.)", r"\1", shown) == name
        for token in [token for one in found for token in one.tokens]:
            (at,) = [end for start, end in graph.edges if start == at and is_right(graph, end)]
            first = graph.nodes[at]["label"][1:-1].split("\\na+b 13%")[0]
            assert re.sub(r"\\(.)", r"\1", first) == visible(token.token)


def is_right(graph: Graph, name: str) -> bool:
    return "dashed" not in graph.nodes[name].get("style", "")


@given(st.characters())
def test_what_cannot_be_seen_has_a_sign(char):
    shown = visible(char)
    assert (
        shown == char
        if char.isprintable() and char != " "
        else shown != char or unicodedata.category(char) in ("Cn", "Zs")
    )
    assert not any(ord(one) < 32 or one == " " for one in shown)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it():
    nasty = ['say "hi"', "\\", "back\\nslash", "\n", "<|im_end|>", "\x00", "é🦊", "</svg>"]
    drafted = [
        DraftedToken(0, token, None if at == 0 else at - 1, ["suffix"], 0.5, at < 2) for at, token in enumerate(nasty)
    ]
    tokens = [NamedToken(0, token) for token in [*nasty[:2], "end"]]
    one = DraftedPass(tokens, len(nasty), 2, drafted)
    done = subprocess.run(
        ["dot", "-Tsvg"], input=to_dot({'a "name" \\': [one]}), text=True, capture_output=True, check=True
    )
    assert done.stderr == ""
    for text in ("say␣&quot;hi&quot;", "back\\nslash", "&lt;|im_end|&gt;", "\\u{0}", "é🦊", "&lt;/svg&gt;"):
        assert text in done.stdout, text

"""Token trees as a graph in DOT, the language of Graphviz: `dot -Tsvg` draws it.

An answer is a path from left to right; rejected drafts branch off it. The page's `token_tree_dot.js` writes
the same for one answer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from moeflow.text.drafted_passes import DraftedPass

_HEAD: Final = (
    "digraph token_trees {",
    "  rankdir=LR;",
    '  node [shape=box, style=rounded, fontname="monospace"];',
    '  edge [color="#85928e"];',
)
_ACCEPTED: Final = 'style="rounded,filled", fillcolor="#cfe9e5", color="#0b6b63"'
_REJECTED: Final = 'style="rounded,dashed", color="#85928e", fontcolor="#56625e"'
_OWN: Final = 'color="#0b6b63", penwidth=2'
_KEPT_EDGE: Final = ' [color="#0b6b63", penwidth=2]'
_SIGNS: Final = {" ": "␣", "\n": "↵", "\t": "⇥"}  # so that they are seen
_HIDDEN: Final = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # categories of characters that cannot be


def to_dot(answers: Mapping[str, Sequence[DraftedPass]]) -> str:
    """Return one graph of some answers, each beginning with a node of its name.

    Drafted tokens show their speculator and probability. Accepted ones are filled, rejected ones dashed; the model's
    own choices have a thick frame.
    """
    lines = [*_HEAD]
    for number, (name, passes) in enumerate(answers.items()):
        last = f"a{number}"
        lines.append(f"  {last} [label={_quoted(name)}, shape=plaintext];")
        for place, one in enumerate(passes, start=1):
            *drawn, last = _pass_lines(f"a{number}p{place}", place, one, last)
            lines += drawn
    return "\n".join([*lines, "}", ""])


def visible(token: str) -> str:
    """Return a token's text with signs for what cannot be seen."""
    return "".join(
        _SIGNS.get(char) or (_code(char) if unicodedata.category(char) in _HIDDEN else char) for char in token
    )


def _pass_lines(prefix: str, place: int, one: DraftedPass, last: str) -> Iterator[str]:
    """Yield a pass's lines, after the node `last`; finally the node where the answer continues."""
    names = [f"{prefix}n{node}" for node in range(len(one.drafted))]
    edges = []
    if one.num_drafted:  # else it needs no frame
        yield f"  subgraph cluster_{prefix} {{"
        yield f'    label="pass {place}: {one.num_accepted} of {one.num_drafted} kept"; color="#dde3e1"; fontsize=10;'
    before = last
    for name, token in zip(names, one.drafted, strict=True):
        who = f"{'+'.join(token.speculators)} {int(100 * token.chance + 0.5)}%"
        look = _ACCEPTED if token.is_accepted else _REJECTED
        yield f"    {name} [label={_quoted(visible(token.token), who)}, {look}];"
        parent = before if token.parent is None else names[token.parent]
        edges.append(f"  {parent} -> {name}{_KEPT_EDGE if token.is_accepted else ''};")
        last = name if token.is_accepted else last
    for number, own in enumerate(one.tokens[one.num_accepted if one.drafted else 0 :]):
        name = f"{prefix}t{number}"
        yield f"    {name} [label={_quoted(visible(own.token))}, {_OWN}];"
        edges.append(f"  {last} -> {name}{_KEPT_EDGE};")
        last = name
    if one.num_drafted:
        yield "  }"
    yield from edges
    yield last


def _code(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"


def _quoted(*lines: str) -> str:
    """Return lines as a DOT string."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'

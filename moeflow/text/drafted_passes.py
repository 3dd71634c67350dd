"""The drafts of a sequence, pass by pass, as text: token trees for users.

A pass has the tokens that it brought and the tree of drafted tokens that it checked. The accepted ones are the first of
its tokens, in order; the last token is the model's own, unless the sequence ended before it. So the tokens of all
passes, one after another, are those of the answer.
"""

from __future__ import annotations

import msgspec

from moeflow.core.engine_messages import MAX_DRAFTED_TOKENS, DraftedTree, TokenOutput
from moeflow.core.token_tree import ROOT
from moeflow.text.token_bytes import token_label
from moeflow.text.tokenizer import Tokenizer


class NamedToken(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token_id: int
    token: str  # its text; part of a character as `bytes:\\xf0`


class DraftedToken(msgspec.Struct, frozen=True):
    """A token that was drafted and computed."""

    token_id: int
    token: str
    parent: int | None  # place of the drafted token that it follows, in the same list; None: it follows the pass before
    speculators: list[str]  # who drafted it
    chance: float  # that it is right, and all before it, as was expected before the pass
    is_accepted: bool


class DraftedPass(msgspec.Struct, frozen=True):
    """The tokens of one sequence in a pass, and its drafted tokens."""

    tokens: list[NamedToken]
    num_drafted: int
    num_accepted: int  # of these; they are the first tokens
    drafted: list[DraftedToken]  # parents first; empty beyond `MAX_DRAFTED_TOKENS` of the sequence


class DraftTexts:
    """Decodes the drafts of one sequence, up to a limit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_left = MAX_DRAFTED_TOKENS

    def push(self, output: TokenOutput, num_tokens: int) -> DraftedPass | None:
        """Return a pass; its first `num_tokens` tokens belong to the sequence; None: it brought none."""
        if not num_tokens:
            return None
        tokens = [NamedToken(token_id, self._text(token_id)) for token_id in output.token_ids[:num_tokens]]
        tree = output.drafted_tree
        if tree is None:
            return DraftedPass(tokens, 0, 0, [])
        accepted = tree.accepted[:num_tokens]
        self._num_left -= len(tree.token_ids)
        drafted = self._drafted(tree, set(accepted)) if self._num_left >= 0 else []
        return DraftedPass(tokens, len(tree.token_ids), len(accepted), drafted)

    def _drafted(self, tree: DraftedTree, accepted: set[int]) -> list[DraftedToken]:
        each = zip(tree.token_ids, tree.parents, tree.speculators, tree.chances, strict=True)
        return [
            DraftedToken(
                token_id, self._text(token_id), None if parent == ROOT else parent, names, chance, node in accepted
            )
            for node, (token_id, parent, names, chance) in enumerate(each)
        ]

    def _text(self, token_id: int) -> str:
        return token_label(self._tokenizer.token_bytes(token_id))

"""The drafts of an answer, pass by pass: our own field of choices, for requests with `token_trees: true`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class NamedTokenObject(BaseModel):
    """A token of the answer."""

    token_id: int
    token: str


class DraftedTokenObject(NamedTokenObject):
    """A drafted token."""

    parent: int | None = Field(description="Place in the list of the one that it follows; null: the pass before.")
    speculators: list[str] = Field(description="Who drafted it.")
    chance: float = Field(description="That it is right, and all before it, as expected before the pass.")
    is_accepted: bool


class DraftedPassObject(BaseModel):
    """A pass of the model, the tokens that it brought, and the tree of drafted tokens that it checked.

    The first `num_accepted` tokens were drafted; the tokens of all passes make up the answer.
    """

    tokens: list[NamedTokenObject]
    num_drafted: int
    num_accepted: int
    drafted: list[DraftedTokenObject] = Field(description="Empty once a long answer's trees exceed the limit.")


TokenTrees = Annotated[
    list[DraftedPassObject] | None,
    Field(exclude_if=lambda trees: trees is None, description="Only if the request asks for token_trees."),
]

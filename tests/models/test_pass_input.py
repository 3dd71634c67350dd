"""A pass in micro-batches has the same tokens, positions and results, in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.models.pass_input import PassInput


@st.composite
def passes(draw):
    """Draw a pass of some sequences, of whose tokens some have logits, a few in two lists."""
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    num_tokens = sum(counts)
    rows = st.lists(st.integers(0, num_tokens - 1), unique=True, max_size=5).map(sorted)
    return PassInput(
        token_ids=list(range(100, 100 + num_tokens)),
        starts=[draw(st.integers(0, 20)) for _ in counts],
        num_tokens=counts,
        block_ids=[(sequence,) for sequence in range(len(counts))],
        logit_rows=draw(st.lists(rows, max_size=3)),
        pooled_rows=draw(st.lists(rows, max_size=3)),
        num_micro_batches=draw(st.integers(1, num_tokens)),
    )


def places(given_pass):
    """Return (sequence, position) of each token."""
    spans = zip(given_pass.starts, given_pass.num_tokens, given_pass.block_ids, strict=True)
    return [(sequence, start + offset) for start, count, (sequence,) in spans for offset in range(count)]


@given(passes())
def test_micro_batches_put_together_are_the_pass(whole):
    pieces = whole.micro_batches()
    assert len(pieces) == whole.num_micro_batches
    sizes = [len(piece.token_ids) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [place for piece in pieces for place in places(piece)] == places(whole)
    found = [piece.token_ids[row] for piece in pieces for row in piece.logit_rows[0]]
    assert found == [whole.token_ids[row] for row in whole.result_rows()]
    assert {row for rows in whole.logit_rows + whole.pooled_rows for row in rows} == set(whole.result_rows())

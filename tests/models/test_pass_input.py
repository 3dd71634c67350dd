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


@given(st.data())
def test_parts_that_are_cut_where_they_may_be_read_nothing_that_others_write(data):
    """Blocks of two tokens; a sequence may begin with full blocks of those before, of the same pass or not."""
    known, block_ids, starts, counts = list(range(100, 104)), [], [], []
    for sequence in range(data.draw(st.integers(1, 6))):
        shared = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
        count = data.draw(st.integers(1, 6))
        own = [10 * sequence + number for number in range((count + 1) // 2)]
        block_ids.append((*shared, *own))
        starts.append(2 * len(shared))
        counts.append(count)
        known += own[: count // 2]
    rows = [token for count in counts for token in range(count)]
    whole = PassInput(rows, starts, counts, block_ids, [[0]])
    bounds = whole.independent_bounds(2)
    written = [set(blocks[start // 2 :]) for blocks, start in zip(block_ids, starts, strict=True)]
    assert bounds == [
        bound
        for bound in range(1, len(counts))
        if not any(written[a] & set(block_ids[b]) for a in range(bound) for b in range(bound, len(counts)))
    ]
    number = data.draw(st.integers(1, len(bounds) + 1))
    parts = whole.cut(bounds, number)
    assert 1 <= len(parts) <= number
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [place for part in parts for place in zip(part.starts, part.num_tokens, part.block_ids, strict=True)] == [
        *zip(starts, counts, block_ids, strict=True)
    ]

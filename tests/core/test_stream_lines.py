import asyncio
import re

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.stream_lines import async_stream_lines, stream_lines

PIECES = st.lists(st.text(st.sampled_from("ab\r\n\v\f\x1c\x85\u2028\u2029"), max_size=6), max_size=6)


@given(PIECES)
def test_lines_end_at_cr_lf_or_both_however_a_text_is_cut(pieces):
    *whole, rest = re.split("\r\n|\r|\n", "".join(pieces))
    expected = [*whole, rest] if rest else whole
    assert list(stream_lines(pieces)) == expected

    async def arriving():
        for piece in pieces:
            yield piece

    async def read() -> list[str]:
        return [line async for line in async_stream_lines(arriving())]

    assert asyncio.run(read()) == expected

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 9), max_size=8),
    data=st.data(),
)
def test_token_ids_are_a_slice_of_prompt_and_output(prompt, output, data):
    request = Request("r", prompt, SamplingParams(), 16, output_token_ids=output)
    everything = prompt + output
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    assert request.token_ids(start, stop) == everything[start:stop]
    assert request.num_tokens == len(everything)

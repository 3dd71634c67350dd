"""Ranks share the experts of encoders and of encoder-decoders; each request gets the bits of one process."""

from __future__ import annotations

import pytest

from moeflow import LLM
from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from tests.engine.test_encoder_decoder import ASKED, config_of, run
from tests.engine.test_encoders import INPUTS, RAW
from tests.tiny_switch import write_tiny_encoder, write_tiny_switch, write_tiny_t5

LAYOUTS = [
    {"num_ranks": 2, "expert_layout": "sliced", "attention_layout": "data"},
    {"num_ranks": 3, "expert_layout": "expert", "attention_layout": "data"},
    {"num_ranks": 2, "expert_layout": "sliced", "attention_layout": "replicated"},
    {"num_ranks": 2, "expert_layout": "expert", "attention_layout": "replicated"},
]
pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


@pytest.fixture(scope="module")
def decoding(tmp_path_factory):
    """A model whose decoder has other layers with experts than its encoder, and what one process answers."""
    folder = tmp_path_factory.mktemp("switch")
    write_tiny_switch(folder, num_sparse_encoder_layers=2, num_decoder_layers=3, num_sparse_decoder_layers=3)
    return folder, run(config_of(folder))[0]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_an_encoder_decoder_gives_the_bits_of_one_process(decoding, in_threads, layouts):
    folder, expected = decoding
    assert run(config_of(folder, max_num_seqs=8, **layouts))[0] == expected


@pytest.mark.parametrize("layouts", LAYOUTS[:1], ids=str)
def test_a_rank_without_inputs_or_outputs_joins_the_layers_of_the_others(decoding, in_threads, layouts):
    folder, expected = decoding
    single = ASKED[2:3]
    assert run(config_of(folder, **layouts), single)[0] == {"2": expected["2"]}


@pytest.mark.parametrize("layouts", LAYOUTS[:1], ids=str)
def test_an_encoder_gives_the_vectors_of_one_process(tmp_path, in_threads, layouts):
    write_tiny_encoder(tmp_path)

    def vectors(**settings):
        with LLM(tmp_path, num_threads=1, max_model_len=160, **settings) as llm:
            return llm.embed(INPUTS, RAW, progress=False)

    assert vectors(**layouts) == vectors()


def test_passes_of_an_encoder_decoder_are_not_cut(decoding):
    with pytest.raises(ConfigError, match="an encoder, whose inputs are computed whole: remove one"):
        config_of(decoding[0], num_ranks=2, rank_schedule="asynchronous")


def test_encoders_without_experts_have_nothing_to_share(tmp_path):
    write_tiny_t5(tmp_path)
    with pytest.raises(ConfigError, match=r"without experts: use one$"):
        config_of(tmp_path, num_ranks=2)

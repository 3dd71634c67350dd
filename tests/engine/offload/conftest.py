"""The tiny model that all runs on a small device share."""

import pytest

from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_local_experts=5, num_hidden_layers=3)
    return str(folder)

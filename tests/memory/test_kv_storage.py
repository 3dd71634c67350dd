import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.memory.kv_storage import KVStorage


def _storage(**changes):
    shape = {"num_layers": 3, "num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    return KVStorage(**(shape | {"dtype": torch.bfloat16, "device": "cpu"} | changes))


def test_layers_are_apart_and_zeroed():
    storage = _storage()
    assert storage.num_bytes == 3 * 5 * 4 * 2 * 2 * 8 * 2
    storage.layer(1).fill_(1.0)
    for layer_idx, want in ((0, 0.0), (1, 1.0), (2, 0.0)):
        blocks = storage.layer(layer_idx)
        assert blocks.shape == (5, 4, 2, 2, 8)
        assert (blocks == want).all()


def test_what_does_not_fit_says_how_much_it_needs():
    with pytest.raises(CapacityError, match=r"needs 524288\.0 GiB on cpu"):
        _storage(num_layers=2**20, num_blocks=2**21)

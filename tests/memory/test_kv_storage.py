import pytest
import torch

from moeflow.core.errors import CapacityError
from moeflow.memory.kv_storage import KVStorage


def _storage(**changes):
    shape = {"num_layers": 3, "num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    return KVStorage(**(shape | {"dtype": torch.bfloat16, "device": "cpu"} | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layers_are_apart_and_zeroed(dtype):
    storage = _storage(dtype=dtype)
    assert storage.num_bytes == 3 * 5 * 4 * 2 * 2 * (8 * dtype.itemsize + (4 if dtype == torch.int8 else 0))
    storage.layer(1).storage.fill_(1)
    for layer_idx, want in ((0, 0), (1, 1), (2, 0)):
        blocks = storage.layer(layer_idx)
        assert blocks.keys.shape == blocks.values.shape == (5, 2, 4, 8)
        assert (blocks.storage == want).all()


def test_what_does_not_fit_says_how_much_it_needs():
    with pytest.raises(CapacityError, match=r"needs 524288\.0 GiB on cpu"):
        _storage(num_layers=2**20, num_blocks=2**21)

"""A checkpoint in memory, so that a test can take tensors away, add some and bend their shapes."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable
from moeflow.core.model_config import ConfigReader
from moeflow.models.registry import find_family


class FakeCheckpoint:
    path = Path("/models/fake")
    config_file = path / "config.json"
    generation_config: Mapping[str, Any] = MappingProxyType({})
    dtype = torch.float32

    def __init__(self, config, weights):
        self.config = config
        self.weights = weights

    @property
    def tensors(self):
        file = self.path / "model.safetensors"
        return TensorTable(
            {name: TensorInfo(tuple(w.shape), w.nbytes, str(w.dtype)[6:], file) for name, w in self.weights.items()}
        )

    def read(self, name):
        return self.weights[name]

    def read_rows(self, name, start, stop):
        return StoredRows(self.weights[name][start:stop], torch.arange(start, stop))

    def close(self):
        pass


def shape_of(config):
    """Return what the config's family reads from it, weights or not."""
    checkpoint = FakeCheckpoint(config, {})
    return find_family(checkpoint).read_config(ConfigReader(config, checkpoint.config_file))

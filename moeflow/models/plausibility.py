"""What a config says of a model, held against the headers of its weights before anything is built from it.

Cheap, so that it can come first: sizes that no weights stand behind would take minutes and gigabytes to find out one
by one. The loader checks that each tensor exists and has its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import MOST, ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr

_MIN_IN_LAYER = 5  # tensors: two norms, attention's input and output, a feed-forward network
_SLACK = 4  # times the weights: close enough for a loader to name the wrong tensor


def check_sizes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a config describes a model far larger than the weights are."""
    num_layers = config.num_layers + config.num_encoder_layers
    num_tensors = (
        _MIN_IN_LAYER * num_layers
        + config.feed_forward.num_matrices * config.num_moe_layers * config.routing.num_experts
    )
    num_values = checkpoint.tensors.num_values
    if num_tensors > _SLACK * len(checkpoint.tensors) + _MIN_IN_LAYER * _SLACK:
        experts = f" of {config.routing.num_experts} experts each" if config.routing.num_experts else ""
        raise _too_large(
            f"describes {num_layers} layers{experts}, where the weights are {len(checkpoint.tensors)} tensors",
            checkpoint,
        )
    if config.num_parameters > _SLACK * num_values:
        raise _too_large(
            f"describes a model of {config.num_parameters} parameters, where the weights are {num_values} numbers",
            checkpoint,
        )


def _too_large(problem: str, checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        problem,
        file=checkpoint.config_file,
        remedy="Check that it belongs to these weights, or download the model again",
    )


def read_eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return what ends a text: `generation_config.json` knows better than `config.json`, which may say null.

    Raises: CheckpointError if one of the two says something else than token ids.
    """
    config_file = checkpoint.config_file
    generation = _token_ids(ConfigReader(checkpoint.generation_config, generation_file(checkpoint)))
    model = _token_ids(ConfigReader(checkpoint.config, config_file))
    text = checkpoint.config.get("text_config")  # of a multimodal model
    return generation or model or (_token_ids(ConfigReader(text, config_file)) if isinstance(text, Mapping) else ())


def generation_file(checkpoint: Checkpoint) -> Path:
    """Return the file that `checkpoint.generation_config` is read from."""
    config_file = checkpoint.config_file
    return config_file.with_name("generation_config.json") if config_file.name == "config.json" else config_file


def _token_ids(reader: ConfigReader) -> tuple[int, ...]:
    value = reader.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id <= MOST for token_id in ids):
        raise reader.error(f"'eos_token_id' is {truncated_repr(value)}, no token id")
    return tuple(ids)

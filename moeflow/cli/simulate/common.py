"""What the `simulate` commands have in common that need no model and no machine, only their descriptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from moeflow.cli import lazy
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import Machine
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.weight_format import QUANTIZED
from moeflow.planner.costs.model_costs import Formats
from moeflow.planner.costs.roofline import processor_of
from moeflow.planner.hardware.machine_files import machine_names
from moeflow.planner.model_files import shipped_models

SHIPPED = f"""Shipped machines: {", ".join(machine_names())}.
Shipped models: {", ".join(shipped_models())}."""


def described_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the model, its format, the machine and its number of devices."""
    devices = click.option("--devices", type=click.IntRange(1), default=1, help="That hold a part of every layer each.")
    return shape_options(devices(command))


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the model, its format and the machine."""
    options = [
        click.option("--machine", required=True, help="A shipped machine, or a JSON file that describes one."),
        click.option("--model", required=True, help="A shipped shape, a config.json, a model's folder or a GGUF file."),
        click.option(
            "--weights",
            type=click.Choice(["float32", "float16", "bfloat16", *QUANTIZED]),
            help="Their format.  [default: the 16-bit one that the machine computes]",
            show_default=False,
        ),
    ]
    return functools.reduce(lambda inner, option: option(inner), reversed(options), command)


def read_shape(model: str) -> ModelConfig:
    """Return a model's shape, without its weights. Raises: CheckpointError."""
    shipped = shipped_models()
    if model in shipped:
        return lazy.read_bare_config(shipped[model])
    if Path(model).suffix == ".json":
        return lazy.read_bare_config(Path(model))
    return lazy.read_model_config(lazy.open_checkpoint(lazy.local_path(model)))


def choose_formats(machine: Machine, weights: str | None) -> Formats:
    """Return the formats to assume.

    Where matrices have 32 bits, so has everything. Otherwise embeddings have 16, and on devices keys and values, too.
    """
    if weights == "float32":
        return Formats(matrices=weights, embeddings=weights, kv=weights)
    half = "bfloat16" if processor_of(machine.compute_level).has_bfloat16 else "float16"
    if machine.num_devices:
        return Formats(matrices=weights or half, embeddings=half, kv=half, activation_bytes=2)
    return Formats(matrices=weights or half, embeddings=half, kv="float32", activation_bytes=4)


def check_devices(machine: Machine, shape: ModelConfig, num_devices: int) -> None:
    """Print a note if there are more devices than the machine has. Raises: ConfigError if they cannot share a layer."""
    if num_devices > 1 and not machine.num_devices:
        raise ConfigError(f"{machine.name} has no device, but --devices {num_devices} are asked for: remove it")
    if shape.attention.num_heads % num_devices:
        raise ConfigError(
            f"{num_devices} devices (--devices) cannot each have a part of every layer: this model has "
            f"{shape.attention.num_heads} heads, so take a number that divides {shape.attention.num_heads}"
        )
    if num_devices > max(machine.num_devices, 1):
        others = f"{num_devices} are assumed, as if each had a link like its own"
        click.echo(f"note: {machine.name} has {machine.num_devices} device(s); {others}", err=True)

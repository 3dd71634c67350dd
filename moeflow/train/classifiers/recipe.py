"""The options of a classifier's training."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.train.recipe import Recipe, count, learning_rate, minutes, option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierRecipe(Recipe):
    """The options that decide the result, besides the texts.

    A classifier to enlarge has its own layers, heads and ffn-size.
    """

    minutes: float = minutes(5.0, "the training")
    epochs: int | None = count(None, "Most epochs, without a time limit.")
    learning_rate: float = learning_rate(6e-4)
    batch_size: int = count(32, "Texts in a step.")
    dropout: float = option(0.2, "Dropout in training.", least=0, below=1)
    layers: int = count(2, "Number of layers.")
    sparse_layers: int = count(2, "Number of layers with experts: every (layers / sparse-layers)-th.")
    experts: int = count(8, "Experts of a layer.", least=2)
    heads: int = count(9, "Attention heads.")
    head_dim: int = count(64, "Size of a head.")
    ffn_size: int = count(512, "Size of an expert.")
    seed: int = option(0, "The same seed gives the same weights.")
    dtype: str = option("float32", "Type of the saved weights.", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        rule = f"a multiple of sparse-layers, {self.sparse_layers}"
        require("layers", self.layers, rule, is_valid=self.layers % self.sparse_layers == 0)

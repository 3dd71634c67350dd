"""Limits of a predictor of a classifier's experts: its size, its text, or its inputs.

    python -m studies.sida.limits MODEL --data train.tsv --dev dev.tsv

Routers' choices are a function of the tokens, so a perfect predictor exists. The study compares the published network
with a table of tokens, with other heads and losses, and with less text. Two oracles see more: one gets true hidden
states, the other is the classifier itself without its experts. Hit rates are on texts of --dev: the router's choice is
the first prediction, or among the first three. Rare and frequent tokens are shown apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch import Tensor, nn

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.train.classifiers.network import SwitchClassifier
from moeflow.train.classifiers.saved import load_classifier
from moeflow.train.loop import TrainingLoop
from moeflow.train.predictors.collecting import NUM_KEPT
from moeflow.train.predictors.hit_rates import are_drafted, count_uses
from moeflow.train.predictors.loss import routing_loss
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.predictors.training import Embeddings, PredictorTask, predict
from moeflow.train.schedule import Schedule
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.sida.labels import read_texts

COUNTS: Final = (0, 1, 4, 16, 64)  # the lowest count of each range of tokens
_PASS_TEXTS: Final = 64
_PROBE_SIZE: Final = 256
_PROBE_EPOCHS: Final = 4
_PROBE_ROWS: Final = 512  # of a step
_PROBE_RATE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Routed:
    """Texts with routing, and what routers see. Shapes: inputs [layers, N, H]; logits [N, layers, E]."""

    text: RoutedText
    inputs: Tensor
    logits: Tensor

    @property
    def experts(self) -> Tensor:
        """The choices: [N, layers, 1]."""
        return self.logits.argmax(-1, keepdim=True)


@torch.no_grad()
def routed(network: SwitchClassifier, texts: Sequence[Tensor]) -> Routed:
    """Run texts, whose tokens are rows of the network's table."""
    parts = [network(texts[at : at + _PASS_TEXTS])[1] for at in range(0, len(texts), _PASS_TEXTS)]
    logits = torch.cat([torch.stack([layer.logits for layer in part], dim=1) for part in parts])
    inputs = torch.cat([torch.stack([layer.inputs for layer in part]) for part in parts], dim=1)
    best = logits.topk(min(NUM_KEPT, logits.shape[-1]), dim=-1)
    text = RoutedText(
        token_ids=torch.cat(list(texts)),
        lengths=torch.tensor([len(text) for text in texts]),
        experts=best.indices.to(torch.int16),
        logits=best.values.to(torch.float16),
        is_found=torch.ones(len(texts), dtype=torch.bool),
        is_known=torch.ones(len(logits), dtype=torch.bool),
    )
    return Routed(text, inputs, logits)


@torch.no_grad()
def without_experts(network: SwitchClassifier, texts: Sequence[Tensor]) -> Tensor:
    """Return the routers' logits where experts add nothing: attention and routers alone are the model's."""
    blocks = [block for block in network.encoder.modules() if hasattr(block, "router")]
    for block in blocks:
        block.forward = _routed_alone(block.forward)
    try:
        return routed(network, texts).logits
    finally:
        for block in blocks:
            del block.forward


def _routed_alone(forward: Any) -> Any:
    def run(hidden: Tensor) -> tuple[Tensor, Any]:
        output, found = forward(hidden)
        return torch.zeros_like(output), found

    return run


def token_table(learn: Routed, num_tokens: int) -> Tensor:
    """Return how often each token went to each expert, after a tie-breaker: all tokens' use.

    Shapes: -> [num_tokens, layers, E].
    """
    first, (_, num_layers, num_experts) = learn.experts[..., 0], learn.logits.shape
    table = count_uses(learn.experts, num_experts, 1).float().expand(num_tokens, -1, -1) / (10 * len(first))
    flat = table.clone().flatten()
    places = (learn.text.token_ids[:, None] * num_layers + torch.arange(num_layers)) * num_experts + first
    return flat.index_add_(0, places.flatten(), torch.ones(places.numel())).view(num_tokens, num_layers, num_experts)


def student(network: SwitchClassifier, learn: Routed, epochs: int, recipe: PredictorRecipe) -> ExpertPredictor:
    """Return a trained predictor; a tenth of the texts decides when it is best."""
    torch.manual_seed(recipe.seed)
    shape = PredictorShape(
        embedding_size=network.shape.hidden_size,
        num_layers=network.shape.num_sparse_layers,
        num_experts=network.shape.num_experts,
        top_k=1,
        hidden_size=recipe.hidden_size,
        window=recipe.window,
        is_causal=False,
        has_direct=recipe.heads == "direct",
    )
    task = PredictorTask(ExpertPredictor(shape), learn.text, _embeddings(network), recipe)
    TrainingLoop(task, Schedule(epochs=epochs, num_threads=torch.get_num_threads())).run()
    return task.predictor.eval()


def hidden_probe(learn: Routed, layer: int, recipe: PredictorRecipe) -> nn.Module:
    """Return a network that predicts a layer's router from the true input of the router before it."""
    torch.manual_seed(recipe.seed)
    size, num_experts = learn.inputs.shape[-1], learn.logits.shape[-1]
    probe = nn.Sequential(nn.Linear(size, _PROBE_SIZE), nn.ReLU(), nn.Linear(_PROBE_SIZE, num_experts))
    optimizer = torch.optim.AdamW(probe.parameters(), lr=_PROBE_RATE)
    inputs, text = learn.inputs[layer - 1], learn.text
    for _ in range(_PROBE_EPOCHS):
        for rows in torch.split(torch.randperm(len(inputs)), _PROBE_ROWS):
            optimizer.zero_grad()
            experts, logits = text.experts[rows, layer].long(), text.logits[rows, layer]
            torch.autograd.backward(routing_loss(probe(inputs[rows]), experts, logits))
            optimizer.step()
    return probe.eval()


@torch.no_grad()
def guessed(predictor: ExpertPredictor, network: SwitchClassifier, given: Routed) -> Tensor:
    """Return a predictor's logits for all tokens of texts, in their order: [N, layers, E]."""
    where = given.text.sequences()
    found = [
        predict(predictor, given.text, _embeddings(network), where[at : at + 16]) for at in range(0, len(where), 16)
    ]
    return torch.cat(found)


def _embeddings(network: SwitchClassifier) -> Embeddings:
    rows = network.embed.weight.detach()
    return Embeddings(rows, torch.arange(len(rows)))


def hits(logits: Tensor, given: Routed, number: int, layers: slice = slice(None)) -> Tensor:
    """Return which choices are among the first predictions. Shapes: logits [N, layers, E] -> [N, some layers] bool."""
    return are_drafted(given.experts, logits.topk(number, dim=-1).indices)[:, layers, 0]


class Rows:
    """The study's rows: hit rates of one predictor after another."""

    def __init__(self, dev: Routed, counts: Tensor) -> None:
        """`counts` are the occurrences of each token in the learnt text."""
        self._dev, of_tokens = dev, counts[dev.text.token_ids]
        ends = [*COUNTS[1:], int(of_tokens.max()) + 1]
        self._ranges = [(of_tokens >= low) & (of_tokens < high) for low, high in zip(COUNTS, ends, strict=True)]
        self.found: list[dict[str, Any]] = []

    def add(self, name: str, logits: Tensor, learn: Routed | None, *, first_layer: int = 0, **fields: Any) -> None:
        """Add a predictor's row, given its logits for the texts of --dev; `learn` is the learnt text."""
        layers = slice(first_layer, None)
        top1, top3 = (hits(logits, self._dev, number, layers).float() for number in (1, 3))
        self.found.append(
            {
                "predictor": name,
                "text_tokens": 0 if learn is None else len(learn.text.token_ids),
                "top1": float(top1.mean()),
                "top3": float(top3.mean()),
                "top3_by_layer": [None] * first_layer + top3.mean(0).tolist(),
                "top3_by_count": [float(top3[them].mean()) if them.any() else None for them in self._ranges],
                **fields,
            }
        )
        click.echo(f"{name}: {self.found[-1]['top3']:.1%} among three", err=True)

    def shares(self) -> list[float]:
        """Return the share of the tokens of --dev in each range of counts."""
        return [float(them.float().mean()) for them in self._ranges]


def load(model: Path, files: Sequence[Path]) -> tuple[SwitchClassifier, list[list[Tensor]]]:
    """Return a classifier with the tokens of the files' texts alone, and these texts."""
    shape, weights, table, labels = load_classifier(model)
    texts = [read_texts(file, model, labels).token_ids for file in files]
    used, places = torch.unique(torch.cat([ids for file in texts for ids in file]), return_inverse=True)
    network = SwitchClassifier(shape, table[used], dropout=0.0)
    network.load_state_dict(weights | {"embed.weight": table[used]})
    flat = iter(places.split([len(ids) for file in texts for ids in file]))
    return network.eval(), [[next(flat) for _ in file] for file in texts]


def measured(network: SwitchClassifier, learn_texts: list[Tensor], dev_texts: list[Tensor], **options: Any) -> Rows:
    """Train and compare all predictors. `options`: `epochs`, `recipe`, `with_less`."""
    epochs, recipe = options["epochs"], options["recipe"]
    learn, dev = routed(network, learn_texts), routed(network, dev_texts)
    num_tokens, num_layers = network.embed.num_embeddings, network.shape.num_sparse_layers
    rows = Rows(dev, torch.bincount(learn.text.token_ids, minlength=num_tokens))
    uses = count_uses(learn.experts, network.shape.num_experts, 1).float()
    rows.add("most used experts", uses.expand(len(dev.logits), -1, -1), learn)
    for name, seen in (("token table", learn), ("token table, of the same texts (oracle)", dev)):
        rows.add(name, token_table(seen, num_tokens)[dev.text.token_ids], seen)
    rows.add("the model without its experts (oracle)", without_experts(network, dev_texts), None)
    for layer in range(1, num_layers):
        logits = torch.zeros_like(dev.logits)
        probe = hidden_probe(learn, layer, recipe)
        with torch.no_grad():
            logits[:, layer] = probe(dev.inputs[layer - 1])
        rows.add(f"hidden states of layer {layer - 1} for layer {layer} (oracle)", logits, learn, first_layer=layer)
    for name, seen, changed in _students(network, learn, learn_texts, recipe, options["with_less"]):
        made = student(network, seen, epochs, changed)
        on_learnt = hits(guessed(made, network, seen), seen, 3).float().mean()
        number = sum(weight.numel() for weight in made.parameters())
        rows.add(name, guessed(made, network, dev), seen, learnt_top3=float(on_learnt), num_weights=number)
    return rows


def _students(
    network: SwitchClassifier, learn: Routed, texts: list[Tensor], recipe: PredictorRecipe, with_less: bool
) -> Iterator[tuple[str, Routed, PredictorRecipe]]:
    """Yield the networks to train: name, text and hyperparameters."""
    for heads, loss in product(("published", "direct"), ("all", "truncated")):
        yield f"network, heads {heads}, loss {loss}", learn, replace(recipe, heads=heads, loss=loss)
    if with_less:
        less = routed(network, texts[: len(texts) // 4])
        yield "network, heads direct, loss truncated", less, replace(recipe, loss="truncated")


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--dev", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--epochs", default=20, show_default=True, help="Of each network, at most; less where it gets no better.")
@click.option("--hidden-size", default=256, show_default=True, help="Of the networks.")
@click.option("--texts", "num_texts", default=100_000, show_default=True, help="Of --data, at most.")
@click.option("--less/--no-less", "with_less", default=True, help="Train with a quarter of the texts, too.")
@result_options
def main(
    model: Path,
    data: Path,
    dev: Path,
    epochs: int,
    hidden_size: int,
    num_texts: int,
    with_less: bool,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure, and keep the record."""
    network, (learn, held_out) = load(model, (data, dev))
    recipe = PredictorRecipe(hidden_size=hidden_size)
    rows = measured(network, learn[:num_texts], held_out, epochs=epochs, recipe=recipe, with_less=with_less)
    publish(
        "sida_limits",
        limits_table,
        out,
        as_json=as_json,
        threads=torch.get_num_threads(),
        model=model.name,
        data=data.resolve().parent.name,
        num_experts=network.shape.num_experts,
        num_layers=network.shape.num_sparse_layers,
        epochs=epochs,
        hidden_size=hidden_size,
        counts=list(COUNTS),
        shares=rows.shares(),
        rows=rows.found,
    )


def limits_table(record: Record) -> Table:
    """Return the record's rows; the last columns are for tokens by their count in the learnt text."""
    ends = [*record["counts"][1:], None]
    ranges = [
        f"{low}+" if end is None else f"{low}" if end == low + 1 else f"{low}-{end - 1}"
        for low, end in zip(record["counts"], ends, strict=True)
    ]
    columns = ("predictor", "tokens learnt", "weights", "top-1", "top-3", "layers", "learnt", *ranges)
    rows = [
        (
            row["predictor"],
            f"{row['text_tokens']:,}" if row["text_tokens"] else "",
            f"{row['num_weights'] / 1e6:.2f} M" if "num_weights" in row else "",
            _percent(row["top1"]),
            _percent(row["top3"]),
            ", ".join(map(_percent, row["top3_by_layer"])),
            _percent(row.get("learnt_top3")),
            *map(_percent, row["top3_by_count"]),
        )
        for row in record["rows"]
    ]
    shares = ", ".join(f"{name}: {share:.0%}" for name, share in zip(ranges, record["shares"], strict=True))
    notes = (
        "top-1, top-3: choices of routers that are among the first one or three predictions, on texts that nothing has "
        "learnt from. layers: top-3 by layer. learnt: top-3 on the learnt texts. The last columns are top-3 of tokens "
        f"that occur so often in all learnt texts; their shares of the texts are {shares}.",
    )
    title = (
        f"{record['model']}, {record['data']}: what limits predictions, {record['num_layers']} x "
        f"{record['num_experts']} experts, hidden size {record['hidden_size']}, {record['epochs']} epochs"
    )
    return Table(title, columns, tuple(rows), notes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    run_study(main)

"""The study of what limits a predictor: oracles against transformers' layers, tables against counts, hits by count."""

from __future__ import annotations

import pytest
import torch

from moeflow.train.classifiers.network import MAX_DISTANCE, NUM_BUCKETS
from moeflow.train.predictors.recipe import PredictorRecipe
from studies.sida import limits
from tests.studies.test_sida import LINES, choices_of_transformers
from tests.tiny_switch import write_tiny_classifier

EXPERTS = 6
RECIPE = PredictorRecipe(hidden_size=8, batch_size=4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return a classifier's network, texts to learn from and others, their own token ids, and transformers' encoder."""
    folder = tmp_path_factory.mktemp("limits")
    buckets = {"relative_attention_num_buckets": NUM_BUCKETS, "relative_attention_max_distance": MAX_DISTANCE}
    encoder, _ = write_tiny_classifier(folder / "model", num_experts=EXPERTS, **buckets)
    for name, lines in (("train", LINES[:40]), ("dev", LINES[40:])):
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    network, texts = limits.load(folder / "model", (folder / "train.tsv", folder / "dev.tsv"))
    own = limits.read_texts(folder / "dev.tsv", folder / "model", ("bad", "fair", "good")).token_ids
    return network, *texts, own, encoder


def test_choices_are_those_of_transformers_with_experts_and_without(loaded):
    network, _, dev, own, encoder = loaded
    wanted = torch.cat([choices_of_transformers(encoder, ids.tolist()) for ids in own])
    assert torch.equal(limits.routed(network, dev).experts[..., 0], wanted)
    blocks = [block.layer[-1] for block in encoder.encoder.block if block.layer[-1].is_sparse]
    for block in blocks:
        forward = block.mlp.forward
        block.mlp.forward = lambda hidden, forward=forward: 0 * forward(hidden)
    alone = torch.cat([choices_of_transformers(encoder, ids.tolist()) for ids in own])
    for block in blocks:
        del block.mlp.forward
    found = limits.without_experts(network, dev).argmax(-1)
    assert torch.equal(found, alone)
    assert torch.equal(found[:, 0], wanted[:, 0])  # the first router comes before all experts
    assert torch.equal(limits.routed(network, dev).experts[..., 0], wanted)


def test_the_table_counts_tokens_and_ranks_by_all_use_behind(loaded):
    network, learn, *_ = loaded
    seen = limits.routed(network, learn)
    table = limits.token_table(seen, network.embed.num_embeddings)
    token_ids, chosen = seen.text.token_ids.tolist(), seen.experts[..., 0].tolist()
    use = [[sum(row[layer] == expert for row in chosen) for expert in range(EXPERTS)] for layer in range(2)]
    for token in {*token_ids[:9], network.embed.num_embeddings - 1}:
        for layer in range(2):
            counts = [
                sum(one == token and row[layer] == expert for one, row in zip(token_ids, chosen, strict=True))
                + use[layer][expert] / (10 * len(chosen))
                for expert in range(EXPERTS)
            ]
            torch.testing.assert_close(table[token, layer], torch.tensor(counts))


def test_rows_are_hits_by_layer_and_by_count(loaded):
    network, learn, dev, *_ = loaded
    rows = limits.measured(network, learn, dev, epochs=1, recipe=RECIPE, with_less=True)
    given = limits.routed(network, dev)
    found = {(row["predictor"], row["text_tokens"]): row for row in rows.found}
    assert len(found) == 10
    oracle = found["the model without its experts (oracle)", 0]
    best = limits.without_experts(network, dev).topk(3).indices.tolist()
    wanted = given.experts[..., 0].tolist()
    by_layer = [
        sum(row[layer] in three[layer] for row, three in zip(wanted, best, strict=True)) / len(wanted)
        for layer in range(2)
    ]
    assert oracle["top3_by_layer"] == pytest.approx(by_layer)
    assert sum(rows.shares()) == pytest.approx(1)
    by_count = zip(oracle["top3_by_count"], rows.shares(), strict=True)
    assert sum((rate or 0) * share for rate, share in by_count) == pytest.approx(oracle["top3"])
    record = {"model": "m", "data": "d", "num_experts": EXPERTS, "num_layers": 2, "epochs": 1, "hidden_size": 8}
    record |= {"counts": list(limits.COUNTS), "shares": rows.shares(), "rows": rows.found}
    table = limits.limits_table(record)
    assert len(table.rows) == 10
    assert {*map(len, table.rows)} == {len(table.columns)}

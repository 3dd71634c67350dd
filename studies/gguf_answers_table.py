"""The records of `gguf_answers.py` as a table: apart, since measuring imports what takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.bench.records import Record
from moeflow.bench.tables import Table


def table(found: Sequence[Record]) -> Table:
    """Return a row for each format."""
    rows = tuple(
        (
            record["format"],
            f"{record['weight_format']} and {record['embedding_format']}",
            f"{record['divergence']:.2g}",
            f"{record['largest_divergence']:.2g}",
            f"{record['same_likeliest_share']:.2%}",
            f"{record['perplexity']:.4f}",
            f"{record['reference_perplexity']:.4f}",
            f"{record['num_same_answers']} of {record['num_answers']}",
        )
        for record in found
    )
    columns = (
        "stored as",
        "kept as, embeddings",
        "KL divergence",
        "largest",
        "same likeliest token",
        "perplexity",
        "of float64",
        "same greedy answers",
    )
    title = f"{found[0]['model']}, rewritten in each format, beside transformers in float64 on the same weights"
    return Table(title, columns, rows, words=(1,))

"""Lines of texts and labels, as a classifier's tokenizer and classes see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.classifiers.labelled_text import LabelledText, labelled_text, read_lines, sorted_labels


def read_texts(file: Path, model: Path, labels: Sequence[str]) -> LabelledText:
    """Return the texts of a file for a classifier with these labels.

    Labels of the file are the classifier's, or, as `moeflow train classifier --labels` takes them, others of the same
    number in their order.

    Raises: ConfigError if a line is no text with a label, or labels fit neither way.
    """
    lines = read_lines(file)
    theirs = sorted_labels(lines)
    if not set(theirs) <= set(labels):
        if len(theirs) != len(labels):
            raise ConfigError(
                f"{file} has the labels {', '.join(theirs)}, and {model} tells {', '.join(labels)} apart: use texts "
                "that it was trained for"
            )
        labels = theirs
    tokenizer = Tokenizer.load(model)
    return labelled_text(file, lines, labels, tokenizer.encode)

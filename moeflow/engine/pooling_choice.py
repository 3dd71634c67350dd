"""Whether a model produces the requested result: text, vectors, classes. Knows no tensors: servers ask, too."""

from __future__ import annotations

from moeflow.core.engine_messages import ModelInfo
from moeflow.core.errors import RequestError
from moeflow.core.pooling_params import POOLING_KINDS, PoolingParams


def check_generates(model: ModelInfo) -> None:
    """Raise RequestError if a model generates no text."""
    if not model.num_layers:
        others = "its vectors (/v1/embeddings)" + (" or its classes (/classify)" if model.labels else "")
        raise RequestError(f"this model is an encoder, which generates no text: ask for {others}", param="model")


def classification(model: ModelInfo) -> PoolingParams:
    """Return the parameters for classifying a prompt. Raises: RequestError if it has none."""
    asked = PoolingParams(kind="mean", normalize=False, classifies=True)
    return check_pooling(model, asked)


def check_pooling(model: ModelInfo, pooling: PoolingParams | None) -> PoolingParams:
    """Return how a vector is made: as is asked for, else as the model's files say.

    Raises: RequestError if they name an unsupported result, or more dimensions than a vector has.
    """
    found = pooling or model.pooling
    if found is None:
        kinds = ", ".join(POOLING_KINDS)
        raise RequestError(
            f"the model's files ask for a pooling that is not supported; name one: {kinds}", param="pooling"
        )
    if found.classifies and not model.labels:
        raise RequestError(
            "this model does not sort texts into classes: take one whose config.json names a class "
            "...ForSequenceClassification, such as `moeflow train classifier` makes"
        )
    if found.dimensions is not None and found.dimensions > model.hidden_size:
        raise RequestError(
            f"dimensions is {found.dimensions}, but this model's vectors have {model.hidden_size} numbers",
            param="dimensions",
        )
    return found

"""Whether a model's vectors can be made as is asked for. Knows no tensors: servers ask, too."""

from __future__ import annotations

from moeflow.core.errors import RequestError
from moeflow.core.pooling_params import POOLING_KINDS, PoolingParams
from moeflow.engine.messages import ModelInfo


def check_pooling(model: ModelInfo, pooling: PoolingParams | None) -> PoolingParams:
    """Return how a vector is made: as is asked for, else as the model's files say.

    Raises: RequestError if they say what there is not here, or if more numbers are asked for than a vector has.
    """
    found = pooling or model.pooling
    if found is None:
        kinds = ", ".join(POOLING_KINDS)
        raise RequestError(
            f"the model's files ask for a pooling that is not supported; name one: {kinds}", param="pooling"
        )
    if found.dimensions is not None and found.dimensions > model.hidden_size:
        raise RequestError(
            f"dimensions is {found.dimensions}, but this model's vectors have {model.hidden_size} numbers",
            param="dimensions",
        )
    return found

"""How a model's files choose tokens where a request leaves that open.

`generation_config.json` is read as transformers and vLLM read it: only keys that it has count. `do_sample: false` is
greedy decoding, whatever the temperature. Other keys of sampling are ignored.
"""

from __future__ import annotations

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.errors import CheckpointError, RequestError
from moeflow.core.sampling_params import CHOICE_FIELDS, SamplingParams
from moeflow.core.token_choice import TokenChoice
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.plausibility import generation_file


def read_sampling_defaults(checkpoint: Checkpoint) -> TokenChoice:
    """Return the model's defaults, and the engine's for keys that its files lack or set to null.

    Raises: CheckpointError, naming file and key, for a value that no request could have.
    """
    raw = checkpoint.generation_config
    given = {name: raw[name] for name in CHOICE_FIELDS if raw.get(name) is not None}
    samples = raw.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _unusable(checkpoint, f"'do_sample' is {truncated_repr(samples)}, where true or false is expected")
    if samples is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given).choice(TokenChoice())
    except RequestError as error:
        raise _unusable(checkpoint, str(error)) from error


def _unusable(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    remedy = "Correct this key, or ignore the file's sampling defaults (--generation-config none)"
    return CheckpointError(problem, file=generation_file(checkpoint), remedy=remedy)

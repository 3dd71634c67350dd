"""Every error moeflow raises on purpose.

MoeflowError
├── ConfigError          a setting that cannot be granted, or two that contradict each other
├── CapacityError        it does not fit: says what is needed, what there is, and what to change
├── CheckpointError      a model file is damaged, incomplete or of an unknown kind
├── HubError             a hub has no such model, keeps it closed, or is out of reach
│   └── HubConnectionError   a connection to it failed or was cut; worth trying again
├── RequestError         one request is refused or failed; the engine lives on
│   ├── ContextLengthError   its prompt cannot fit into the model's context
│   └── QueueFullError   refused because too many requests wait; worth trying again
├── ChatTemplateError    the model's chat template is no valid program, or exceeds the limits set for it
├── StorageError         the disk fails while a model is in use; the requests that need what it holds fail
└── EngineError          the engine itself failed or is gone
    └── GroupError           one of the processes that compute together is gone, late, or not where the others are

Bad input from a user always ends in one of these; `assert` only guards what our own code promises.
"""

from __future__ import annotations

from pathlib import Path

from moeflow.core.truncated_repr import truncated


class MoeflowError(Exception):
    """Base of every error that moeflow raises on purpose."""


class ConfigError(MoeflowError):
    """A setting cannot be granted; the message names the setting and the remedy."""


class CapacityError(MoeflowError):
    """Something does not fit into memory; the message says need, have and what to change."""


class CheckpointError(MoeflowError):
    """A checkpoint cannot be used; the message names file, tensor (where one is at fault) and remedy."""

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        remedy: str,
    ) -> None:
        self.problem = problem
        self.file: str | None = None if file is None else str(file)
        self.tensor = tensor
        self.remedy = remedy
        where = [f"file {self.file}"] if self.file else []
        where += [f"tensor {truncated(tensor)}"] if tensor else []
        prefix = ", ".join(where) + ": " if where else ""
        super().__init__(f"{prefix}{problem}. {remedy}")


class HubError(MoeflowError):
    """A hub refuses a request. The message has the reason and the remedy."""


class HubConnectionError(HubError):
    """A connection to a hub failed, was cut or refused for now: trying again may help, after `wait_s` seconds."""

    def __init__(self, message: str, *, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RequestError(MoeflowError):
    """One request is refused or failed. `param` names the offending request field, if one is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt fills the model's context, so no answer fits. Clients know this error by its words.

    With `is_least` the prompt was not tokenized, and has at least so many tokens.
    """

    def __init__(self, num_prompt_tokens: int, max_model_len: int, *, is_least: bool = False) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + 1} tokens ({num_prompt_tokens} in the prompt, 1 in the completion). Please reduce "
            "the length of the messages or completion."
            + (" The prompt was not tokenized: it has at least so many tokens." if is_least else ""),
            param="prompt",
        )


class QueueFullError(RequestError):
    """Too many requests wait already; `retry_after_s` estimates when a retry will succeed."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ChatTemplateError(MoeflowError):
    """The chat template that came with a model cannot be compiled, or takes more time or memory than it may.

    No fault of the request: another template is needed, unless the conversation is an unusual one.
    """


class StorageError(MoeflowError):
    """A read from disk fails while a model is in use. The message names the file, its purpose and the remedy."""

    def __init__(self, problem: str, *, file: Path | None = None) -> None:
        self._problem = problem
        self._file = file
        super().__init__(problem if file is None else f"file {file}, {problem}")

    @property
    def for_clients(self) -> str:
        """The message with the file's name only: clients must not see its folder."""
        return self._problem if self._file is None else f"file {self._file.name}, {self._problem}"


class EngineError(MoeflowError):
    """The engine failed to start, died, or did not answer in time; `is_from_outside`: because somebody ended it."""

    def __init__(self, message: str, *, is_from_outside: bool = False) -> None:
        super().__init__(message)
        self.is_from_outside = is_from_outside


class GroupError(EngineError):
    """A collective and its group of ranks failed. The message names the rank and the unreached step."""

    signal_number = 0  # that ended a rank's process; 0: none did, or unknown

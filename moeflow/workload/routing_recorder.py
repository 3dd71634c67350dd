"""Writes traces of routing while a model serves: a record a pass, in one piece.

What a crash has cut is cut off when the next run appends. Recording is never a reason for a pass to fail: if the disk
is full, it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moeflow.core.errors import ConfigError
from moeflow.workload.routing_trace import (
    ExpertIds,
    TextShare,
    TraceHeader,
    decode_header,
    encode_header,
    encode_pass,
    whole_records,
)

log = logging.getLogger(__name__)


class RoutingRecorder:
    """Appends a run's passes to a file. One thread uses it."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Open the file or begin it.

        Raises: ConfigError if it cannot be written to, is another process's, or belongs to another model.
        """
        self._path = path
        self._header = header
        self._texts: Sequence[TextShare] = ()
        self._layers: list[tuple[ExpertIds, ExpertIds]] = []  # what routers chose, and those ahead
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            remedy = "Choose another file for --record-routing"
            raise ConfigError(f"cannot write {path}: {error.strerror}. {remedy}") from error
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def top_k(self) -> int:
        """The number of experts that a record has of each token."""
        return self._header.top_k

    def begin_pass(self, texts: Sequence[TextShare]) -> None:
        """Begin a pass over these texts."""
        self._texts, self._layers = texts, []

    def add_layer(self, topk_ids: ExpertIds, ahead: ExpertIds | None = None) -> None:
        """Record what the next layer's router chose, [tokens, K], and routers ahead of it, [A, tokens, K]."""
        nothing = np.empty((0, *topk_ids.shape), self._header.dtype)
        asked = nothing if ahead is None else ahead.astype(self._header.dtype)
        self._layers.append((topk_ids.astype(self._header.dtype), asked))

    def end_pass(self, *, num_generated: int, compute_s: float) -> None:
        """Write the pass down, if all of its layers have been recorded."""
        layers, texts = self._layers, self._texts
        self.drop_pass()
        if self._descriptor < 0 or len(layers) != self._header.num_layers:
            return
        record = encode_pass(layers, texts, num_generated=num_generated, compute_s=compute_s)
        try:
            if os.write(self._descriptor, record) < len(record):
                raise OSError("the disk took a part only")
        except OSError as error:
            log.warning("routing is recorded no longer: %s: %s", self._path, error)
            self.close()

    def drop_pass(self) -> None:
        """Forget a pass that did not come to its end."""
        self._texts, self._layers = (), []

    def close(self) -> None:
        """Release the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is recording into {self._path}. Choose another file") from error
        content = self._path.read_bytes()
        own = encode_header(self._header)
        if own.startswith(content):  # nothing, or as far as a run came that was killed at once
            os.pwrite(self._descriptor, own, 0)
            content = own
        header, start = decode_header(content, self._path)
        if header != self._header:
            raise ConfigError(f"{self._path} has the routing of another model or format. Choose another file")
        end = max((end for _, end in whole_records(content, start, header)), default=start)
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

"""The other ranks of an engine as threads of the test's process, over real groups: nothing has to start."""

from __future__ import annotations

import os
import queue
import threading

from moeflow.engine.ranks.computing import compute_passes
from moeflow.engine.ranks.rank_processes import join_group
from moeflow.engine.ranks.ranks import Ranks
from moeflow.parallel.shared_memory_group import make_descriptor
from moeflow.parallel.stages import subgroups

PATIENCE_S = 60.0


class RankThreads(Ranks):
    """In the place of `RankProcesses`."""

    def __init__(self, config, parallel):
        number = parallel.num_ranks
        descriptors = [make_descriptor(number), *(make_descriptor(len(ranks)) for ranks in subgroups(parallel))]
        process_ids = [os.getpid()] * number
        groups = [join_group(descriptors, rank, process_ids, parallel) for rank in range(number)]
        for descriptor in descriptors:
            os.close(descriptor)
        self.group = groups[0]
        self._config = config
        self._loaded = threading.Semaphore(0)
        self._messages = [queue.SimpleQueue() for _ in range(1, number)]
        pairs = zip(groups[1:], self._messages, strict=True)
        self._threads = [threading.Thread(target=self._compute, args=each, daemon=True) for each in pairs]
        for thread in self._threads:
            thread.start()

    def wait_until_loaded(self):
        for _ in self._threads:
            assert self._loaded.acquire(timeout=PATIENCE_S)

    def close(self):
        for messages in self._messages:
            messages.put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self.group.close()

    def _compute(self, group, messages):
        try:
            compute_passes(self._config, group, iter(messages.get, None), self._loaded.release)
        except Exception as error:
            group.abort(f"{type(error).__name__}: {error}")  # and so the first rank gets to know
            self._loaded.release()
        finally:
            group.close()

    def _look(self):
        pass  # threads do not get lost

    def _tell_all(self, message):
        for messages in self._messages:
            messages.put(message)

    def _note_ending(self, error):
        """Threads end by themselves."""

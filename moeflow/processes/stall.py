"""When an engine's process is taken to be stuck: it does not run, or a pass does not end.

A process gives no heartbeat if it is stopped (SIGSTOP, a frozen container) or blocks while it holds the interpreter's
lock. A process in an endless pass does. Only time separates that from a slow pass, so the bound exceeds all predicted
and observed passes. Counts time in its caller's ticks, so a machine that slept is no stuck engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import ModelInfo
from moeflow.kernels.weight_format import BITS_PER_VALUE

TIMEOUT_S = 300.0  # after which an engine that is stuck is ended, unless the user sets another
SILENCE_S = 10.0  # heartbeats come every second; ten are not missed because a machine is busy
LOST_S = 6.0  # after which a process on a silent machine, or a stopped one, is ended
STALLED_SHARE = 0.2  # of the time after which a pass is ended: then it is called stalled
SLOWER_THAN_SEEN = 10.0  # a pass may take so many times as long as the longest so far
_SLOW_FLOPS = 1e10  # of one thread, where a fast one reaches several times that
_SLOW_DISK_BYTES_PER_S = 1e8


def foreseen_pass_s(config: EngineConfig, model: ModelInfo) -> float:
    """Return what the longest pass takes where everything is slow: all tokens, all weights from a disk."""
    num_flops = 2.0 * model.num_active_parameters * config.scheduler.max_num_batched_tokens
    num_bytes = BITS_PER_VALUE[model.weight_format] / 8 * model.num_parameters
    return num_flops / (_SLOW_FLOPS * max(config.num_threads, 1)) + num_bytes / _SLOW_DISK_BYTES_PER_S


@dataclass(slots=True)
class StallWatch:
    """Judges one process by its heartbeats and messages. `tick` regularly; `note_message` with each message."""

    timeout_s: float  # after which a silent process, or a pass that does not end, is to be ended; 0: never
    foreseen_s: float = 0.0  # how long a pass may take
    silence_s: float = 0.0  # since the last heartbeat
    pass_s: float = 0.0  # since the last message, while there is work
    longest_pass_s: float = 0.0
    lost_s: float = 0.0  # since its machine was silent, or the process stopped
    _beat: int = 0
    _was_stopped: bool = False  # during the pass under way

    def note_message(self) -> None:
        """The process has sent something: a pass is over."""
        if not self._was_stopped:
            self.longest_pass_s = max(self.longest_pass_s, self.pass_s)
        self.pass_s = 0.0
        self._was_stopped = False

    def tick(self, elapsed_s: float, beat: int, *, has_work: bool, is_lost: bool = False) -> None:
        """Count this time. `beat` is the newest heartbeat, 0 before the first. `is_lost`: its host has a problem."""
        self.lost_s = self.lost_s + elapsed_s if is_lost else 0.0
        self.silence_s = self.silence_s + elapsed_s if beat == self._beat and beat else 0.0
        self._beat = beat
        self._was_stopped |= is_lost or self.silence_s >= SILENCE_S
        self.pass_s = self.pass_s + elapsed_s if has_work else 0.0

    @property
    def pass_limit_s(self) -> float:
        """How long a pass may take before the process is ended."""
        return max(self.timeout_s or TIMEOUT_S, SLOWER_THAN_SEEN * self.longest_pass_s, self.foreseen_s)

    @property
    def problem(self) -> str:
        """The problem; empty: none."""
        if self.silence_s >= SILENCE_S:
            return f"the engine process has not run for {self.silence_s:.0f} s"
        if self.pass_s >= STALLED_SHARE * self.pass_limit_s:
            return f"the engine has had work for {self.pass_s:.0f} s, and no pass has ended"
        return ""

    @property
    def is_overdue(self) -> bool:
        """Whether the process is to be ended."""
        is_late = self.silence_s >= self.timeout_s or self.pass_s >= self.pass_limit_s
        return bool(self.timeout_s) and (is_late or self.lost_s >= min(LOST_S, self.timeout_s))

"""An engine that sleeps through its passes and repeats each prompt: for studies of all that is around an engine.

It speaks the messages of a real one, so a supervisor cannot tell. Run as its process by `SleepingHost`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import msgspec
import zmq
import zmq.asyncio

from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import (
    Cancellation,
    EngineStats,
    FromEngine,
    ModelInfo,
    Outputs,
    Ready,
    Shutdown,
    Stopped,
    Submission,
    ToEngine,
    TokenOutput,
)
from moeflow.core.request import FinishReason
from moeflow.processes.engine_host import LocalHost
from moeflow.processes.lifeline import tie_to_parent
from moeflow.processes.pass_record import PassRecord, make_descriptor
from moeflow.processes.socket_folder import SocketFolder

PASS_S = "SLEEPING_PASS_S"  # variable with the seconds of a pass


def sleeping_config(model_path: str, *, max_num_seqs: int, num_threads: int = 1) -> EngineConfig:
    """Return the configuration of an engine that loads nothing."""
    scheduler = SchedulerConfig(num_blocks=1 << 16, max_model_len=1 << 16, max_num_seqs=max_num_seqs)
    return EngineConfig(
        model_path=model_path,
        model_name="sleeping",
        dtype="float32",
        weight_format="float32",
        embedding_format="float32",
        cpu_isa="",
        kv_dtype="float32",
        device="cpu",
        num_threads=num_threads,
        scheduler=scheduler,
        kv_cache_bytes=0,
    )


class SleepingHost(LocalHost):
    """A process with a sleeping engine."""

    @classmethod
    async def launch(cls, max_num_seqs: int) -> SleepingHost:
        """Start one that has nothing to do yet."""
        folder, descriptor = SocketFolder(), make_descriptor(max_num_seqs)
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(folder.address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "studies.sleeping_engine", folder.address, str(os.getpid()), str(descriptor)),
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        return cls(process, socket, folder, PassRecord(descriptor))


class _Sleeper:
    """Answers each request with its own prompt, again and again."""

    def __init__(self, socket: zmq.Socket[bytes], record: PassRecord, pass_s: float) -> None:
        self._socket = socket
        self._record = record
        self._pass_s = pass_s
        self._encoder = msgspec.msgpack.Encoder()
        self._running: dict[str, tuple[Submission, int]] = {}  # and its number of tokens
        self._num_passes = 0
        self._num_tokens = 0
        self._is_ending = False

    def run(self) -> None:
        """Work until told to end."""
        config = msgspec.msgpack.decode(self._socket.recv(), type=EngineConfig)
        self._send(Ready(_model_of(config), EngineStats()))
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while not self._is_ending:
            end_s = time.monotonic() + self._pass_s
            while (left_s := end_s - time.monotonic()) > 0 or not self._running:
                if self._socket.poll(1000 if not self._running else max(int(left_s * 1000), 1)):
                    self._take(decoder.decode(self._socket.recv()))
                if self._is_ending:
                    break
            self._pass()
        self._send(Stopped())

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submission):
            self._running[message.request_id] = (message, len(message.generated_token_ids))
        elif isinstance(message, Cancellation):
            outputs = [
                TokenOutput(request_id=each, finish_reason=FinishReason.CANCELLED)
                for each in message.request_ids
                if self._running.pop(each, None) is not None
            ]
            self._send(Outputs(outputs, self._stats()))
        elif isinstance(message, Shutdown):
            self._is_ending = True

    def _pass(self) -> None:
        self._record.begin({request_id: number for request_id, (_, number) in self._running.items()})
        outputs = [self._step(*each) for each in list(self._running.values())]
        self._record.end()
        self._num_passes += 1
        self._num_tokens += len(outputs)
        self._send(Outputs(outputs, self._stats()))

    def _step(self, request: Submission, number: int) -> TokenOutput:
        token_id = request.prompt_token_ids[number % len(request.prompt_token_ids)]
        is_last = number + 1 == request.sampling.max_tokens
        if is_last:
            del self._running[request.request_id]
        else:
            self._running[request.request_id] = (request, number + 1)
        reason = FinishReason.LENGTH if is_last else None
        queued_s = 0.0 if number == 0 else None
        return TokenOutput(request_id=request.request_id, token_ids=[token_id], finish_reason=reason, queued_s=queued_s)

    def _stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running), passes_total=self._num_passes, generated_tokens_total=self._num_tokens
        )

    def _send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def _model_of(config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        name=config.model_name,
        path=config.model_path,
        model_type="sleeping",
        vocab_size=1 << 16,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=(0,),
        num_layers=1,
        hidden_size=1,
        num_experts=0,
        top_k=0,
        num_parameters=0,
        num_active_parameters=0,
        weight_format="float32",
        device="cpu",
        kv_capacity_tokens=1 << 20,
        created=int(time.time()),
    )


def main() -> None:
    """Entry point of the process."""
    address, parent_pid, descriptor = sys.argv[1:4]
    record = PassRecord(int(descriptor))
    tie_to_parent(int(parent_pid), record)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    _Sleeper(socket, record, float(os.environ[PASS_S])).run()
    socket.close(linger=2000)
    context.term()


if __name__ == "__main__":
    main()

"""A device: a process that runs one task at a time, and exchanges tokens with the others by messages.

Arguments: the folder of the sockets, and its number. Standard input brings a `Case`, then a form a line; standard
output gets a `Went` for each.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import zmq

from studies.asynchronous.case import VALUES, Case, Ids, Rows

DISPATCH, COMBINE, BARRIER = "dispatch", "combine", "barrier"
ROUNDS: Final = "synchronous, batch by batch"
TOGETHER: Final = "synchronous, all batches as one"
EACH: Final = "asynchronous, each batch apart"
MERGED: Final = "asynchronous, batches merged"
BY_EXPERT: Final = "asynchronous, batches merged for each expert"
HALVES: Final = "asynchronous, batches merged in two halves"
FORMS: Final = (ROUNDS, TOGETHER, EACH, MERGED, BY_EXPERT, HALVES)
TIMEOUT_MS: Final = 60_000


class Message(msgspec.Struct, frozen=True):
    """Tokens on their way to experts, or results on their way back."""

    kind: str
    layer: int
    batches: tuple[int, ...]  # which one task computes
    source: int
    arrives_s: float  # by the clock of all processes
    rows: bytes
    ids: bytes
    places: bytes  # of the pairs, in their batches


class Went(msgspec.Struct, frozen=True):
    """What a device did."""

    wall_s: float  # of the devices that it stands for
    busy_s: float
    num_tasks: int  # of experts
    digest: str


class Device:
    """One of several."""

    def __init__(self, case: Case, number: int, folder: str) -> None:
        """Connect to the others."""
        self.case, self.number = case, number
        context = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{folder}/{number}")
        self._peers = {}
        for peer in range(case.num_devices):
            if peer != number:
                self._peers[peer] = context.socket(zmq.PUSH)
                self._peers[peer].set_hwm(0)
                self._peers[peer].connect(f"ipc://{folder}/{peer}")
        self.arrived: deque[Message] = deque()
        self._coming: list[Message] = []  # sent, but not yet there by the link's speed
        self._decoder = msgspec.msgpack.Decoder(Message)
        self.busy_s, self.num_tasks = 0.0, 0
        self._free_s = 0.0  # when the last task ended
        self._num_waiting = 0  # devices that wait for this one in `meet`

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self._inbox, *self._peers.values()):
            socket.close(linger=0)

    def run(self, form: str) -> Went:
        """Compute all batches of this device, and the experts of all devices that lie here."""
        own = range(self.number, self.case.num_batches * self.case.num_devices, self.case.num_devices)
        each, half = [(batch,) for batch in own], len(own) // 2
        self.meet()
        start_s, self.busy_s, self.num_tasks = time.monotonic(), 0.0, 0
        self._free_s = start_s
        if form in (ROUNDS, TOGETHER):
            found = Synchronous(self).run([tuple(own)] if form == TOGETHER else each)
        else:
            groups = [tuple(own[:half]), tuple(own[half:])] if form == HALVES else each
            found = Asynchronous(self, form).run(groups)
        self.meet()
        wall_s = (time.monotonic() - start_s) / self.case.scale
        digest = hashlib.sha256(b"".join(found[batch].tobytes() for batch in own)).hexdigest()
        return Went(wall_s, self.busy_s / self.case.scale, self.num_tasks, digest)

    def work(self, seconds: float, ready_s: float) -> None:
        """Be busy for the time of a task with inputs from `ready_s` on. A late end does not delay the next one."""
        duration_s = seconds * self.case.scale
        self._free_s = max(self._free_s, ready_s) + duration_s
        self.busy_s += duration_s
        time.sleep(max(self._free_s - time.monotonic(), 0.0))

    def experts(self, pieces: Sequence[Piece], expert: int | None = None) -> None:
        """Compute the pairs of one layer that came from several devices, or those of one expert, as one task."""
        layer = pieces[0].message.layer
        chosen = [piece.left if expert is None else piece.left & (piece.ids == expert) for piece in pieces]
        seconds = self.case.experts_s(np.concatenate([it.ids[rows] for it, rows in zip(pieces, chosen, strict=True)]))
        if seconds:
            self.work(seconds, max(piece.message.arrives_s for piece in pieces))
            self.num_tasks += 1
        for piece, rows in zip(pieces, chosen, strict=True):
            piece.rows[rows] = self.case.expert(layer, piece.ids[rows], piece.rows[rows])
            piece.left[rows] = False
            if not piece.left.any():
                result = msgspec.structs.replace(
                    piece.message, kind=COMBINE, rows=piece.rows.tobytes(), source=self.number
                )
                self.send(piece.message.source, result)
                piece.is_sent = True

    def send(self, target: int, message: Message) -> None:
        """Send a message; its rows arrive when the link would have brought them."""
        num_rows = len(message.rows) // (4 * VALUES)
        delay_s = 0.0 if target == self.number else self.case.message_s(num_rows) * self.case.scale
        message = msgspec.structs.replace(message, arrives_s=self._free_s + delay_s)
        if target == self.number:
            self.arrived.append(message)
        else:
            self._peers[target].send(msgspec.msgpack.encode(message))

    def receive(self, *, waits: bool) -> None:
        """Take all messages that have arrived; with `waits`, at least one. Raises: TimeoutError."""
        is_first = waits and not self.arrived
        while True:
            now_s = time.monotonic()
            self._coming.sort(key=lambda it: it.arrives_s)
            while self._coming and self._coming[0].arrives_s <= now_s:
                message = self._coming.pop(0)
                if message.kind == BARRIER:
                    self._num_waiting += 1
                else:
                    self.arrived.append(message)
                is_first = False
            next_ms = TIMEOUT_MS if not self._coming else max((self._coming[0].arrives_s - now_s) * 1e3, 0.05)
            if not self._inbox.poll(next_ms if is_first else 0):
                if is_first and not self._coming:
                    raise TimeoutError(f"device {self.number} gets no message")
                if not is_first:
                    return
                continue
            while self._inbox.poll(0):
                self._coming.append(self._decoder.decode(self._inbox.recv()))

    def take(self, is_wanted: Callable[[Message], bool], number: int) -> list[Message]:
        """Wait for so many messages of a kind; return them by source. Others stay."""
        while len(found := [message for message in self.arrived if is_wanted(message)]) < number:
            held, self.arrived = self.arrived, deque()
            self.receive(waits=True)
            self.arrived = held + self.arrived
        self.arrived = deque(message for message in self.arrived if not is_wanted(message))
        return sorted(found, key=lambda it: it.source)

    def meet(self) -> None:
        """Wait for all devices."""
        for peer in self._peers:
            self.send(peer, Message(BARRIER, 0, (), self.number, 0.0, b"", b"", b""))
        while self._num_waiting < len(self._peers):
            self.receive(waits=True)
        self._num_waiting -= len(self._peers)

    def dispatches(self, layer: int, batches: tuple[int, ...], attended: Rows, topk_ids: Ids) -> dict[int, Message]:
        """Return what each device gets of batches that are computed together."""
        owners = self.case.device_of[layer][topk_ids]
        found = {}
        for device in range(self.case.num_devices):
            tokens, choices = np.nonzero(owners == device)
            places = tokens * topk_ids.shape[1] + choices
            ids = topk_ids[tokens, choices]
            found[device] = Message(
                DISPATCH, layer, batches, self.number, 0.0, attended[tokens].tobytes(), ids.tobytes(), places.tobytes()
            )
        return found


class Piece:
    """Tokens that wait for experts; each row becomes the result of its pair."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.ids = np.frombuffer(message.ids, np.int64)
        self.rows = np.frombuffer(message.rows, np.float32).reshape(-1, VALUES).copy()
        self.left = np.ones(len(self.ids), bool)
        self.is_sent = False


class Flight:
    """Batches that a device computes as one, on their way through the layers."""

    def __init__(self, case: Case, batches: tuple[int, ...]) -> None:
        self._case, self.batches = case, batches
        self.layer = 0
        self.hidden = np.concatenate([case.input(batch) for batch in batches])
        self.waiting_for = 0  # messages with results
        self.ready_s = 0.0  # when the last of them arrived
        self._attended = self.hidden
        self._pairs = np.zeros(0, np.float32)

    def attend(self, device: Device) -> dict[int, Message]:
        """Compute what precedes the experts; return the tokens for each device."""
        device.work(self._case.attention_s(len(self.hidden)), self.ready_s)
        self._attended = self._case.attend(self.hidden)
        topk_ids = np.concatenate([self._case.topk_ids(self.layer, batch) for batch in self.batches])
        self._pairs = np.zeros((topk_ids.size, VALUES), np.float32)
        found = device.dispatches(self.layer, self.batches, self._attended, topk_ids)
        self.waiting_for = len(found)
        return found

    def take(self, result: Message) -> bool:
        """Take results; return whether the layer is complete."""
        self._pairs[np.frombuffer(result.places, np.int64)] = np.frombuffer(result.rows, np.float32).reshape(-1, VALUES)
        self.waiting_for, self.ready_s = self.waiting_for - 1, max(self.ready_s, result.arrives_s)
        if self.waiting_for:
            return False
        pairs = self._pairs.reshape(len(self.hidden), -1, VALUES)
        self.hidden, self.layer = self._case.add(self._attended, pairs), self.layer + 1
        return True

    def results(self) -> dict[int, Rows]:
        """Return the hidden states of each batch."""
        return dict(zip(self.batches, np.split(self.hidden, len(self.batches)), strict=True))


class Synchronous:
    """Collectives: all devices wait for all, before a layer's experts and after them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, rounds: Sequence[tuple[int, ...]]) -> dict[int, Rows]:
        """Compute batches, one tuple of them after another in each layer."""
        flights = [Flight(self._device.case, batches) for batches in rounds]
        for layer in range(self._device.case.shape.num_layers):
            for number, flight in enumerate(flights):
                self._exchange(flight, number, layer)
        return {batch: rows for flight in flights for batch, rows in flight.results().items()}

    def _exchange(self, flight: Flight, number: int, layer: int) -> None:
        device, every = self._device, self._device.case.num_devices
        for target, message in flight.attend(device).items():
            device.send(target, message)

        def belongs(message: Message, kind: str) -> bool:
            place = message.batches[0] // every
            return (message.kind, message.layer) == (kind, layer) and place == flight.batches[0] // every

        device.experts([Piece(message) for message in device.take(lambda it: belongs(it, DISPATCH), every)])
        for result in device.take(lambda it: belongs(it, COMBINE), every):
            flight.take(result)


class Asynchronous:
    """No collectives: a device computes attention while it can, and else the experts of the tokens that are there."""

    def __init__(self, device: Device, form: str) -> None:
        """Take the form, which decides the extent of a task."""
        self._device, self._form = device, form

    def run(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Rows]:
        """Compute all batches of this device, and experts for all others until those are through."""
        device, case = self._device, self._device.case
        flights = {batches[0]: Flight(case, batches) for batches in groups}
        ready, pieces = deque(flights.values()), list[Piece]()
        left = len(groups) * case.num_devices * case.shape.num_layers  # pieces of work that come here
        num_open = len(flights)
        while left or num_open:
            device.receive(waits=not ready and not pieces)
            for message in device.arrived:
                if message.kind == DISPATCH:
                    pieces.append(Piece(message))
                elif (flight := flights[message.batches[0]]).take(message):
                    is_last = flight.layer == case.shape.num_layers
                    num_open -= is_last
                    ready.extend([] if is_last else [flight])
            device.arrived = deque()
            if ready:
                for target, message in ready.popleft().attend(device).items():
                    device.send(target, message)
            elif pieces:
                self._compute(pieces)
                left -= sum(piece.is_sent for piece in pieces)
                pieces = [piece for piece in pieces if not piece.is_sent]
        return {batch: rows for flight in flights.values() for batch, rows in flight.results().items()}

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """Run one task: for the oldest tokens, and all others that wait for the same weights."""
        oldest = pieces[0]
        if self._form == EACH:
            self._device.experts([oldest])
            return
        same_layer = [piece for piece in pieces if piece.message.layer == oldest.message.layer]
        is_by_expert = self._form == BY_EXPERT and oldest.left.any()
        self._device.experts(same_layer, int(oldest.ids[oldest.left][0]) if is_by_expert else None)


def main() -> None:
    """Entry point of the process."""
    folder, number = sys.argv[1], int(sys.argv[2])
    case = msgspec.json.decode(sys.stdin.buffer.readline(), type=Case)
    device = Device(case, number, folder)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(device.run(msgspec.json.decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

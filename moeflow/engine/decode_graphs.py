"""Decode passes of a model on a GPU as CUDA graphs: the host starts one graph in place of some hundred kernels.

A graph has fixed addresses and shapes. So the inputs lie in one buffer, which a single copy fills before each pass, and
a pass is padded to the next captured number of sequences. A padding row repeats the first row: it chooses the same
experts, so that it reads no others, and it stores nothing. Its recurrent state may already include the first row's
token: then a few experts differ.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from moeflow.core.batch import NO_SLOT, StateUse
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.graph_sizes import captured_sizes
from moeflow.core.out_of_memory import is_out_of_memory
from moeflow.kernels.arrays import rows_of
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.device_table import DeviceTable
from moeflow.kernels.device_arrays import pinned_bytes, views
from moeflow.kernels.on_demand import without_gradients
from moeflow.kernels.recurrent.state_sequences import StateSequences
from moeflow.kernels.recurrent.state_table import StateTable
from moeflow.kernels.triton import attention_tiles, launching
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.packed_layers import OnChoices
from moeflow.models.pass_input import PassInput

logger = logging.getLogger(__name__)

_NO_MEMORY: Final = "no memory is left; allow fewer requests (--max-num-seqs) or a smaller cache (--kv-cache)"
_WARM_UPS: Final = 2  # runs before a capture: they compile kernels, and choose algorithms of products
# One sequence of one token: what passes compute while they are captured.
_PADDING: Final = PassInput(
    token_ids=[0],
    starts=[0],
    num_tokens=[1],
    block_ids=[(0,)],
    logit_rows=[],
    states=[StateUse(NO_SLOT, NO_SLOT)],
)


class Graph(Protocol):
    """A captured pass."""

    def replay(self) -> None:
        """Compute the pass again, from the numbers that its inputs have now."""


class HostSteps(Protocol):
    """The steps of a pass that the host computes between kernels."""

    takes_graphs: bool  # whether the next pass may be a captured one

    def cut_by(self, cut: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """Give the steps of a pass to `cut`, in place of running them, as long as the result is entered."""


class CutGraph:
    """A captured pass in several graphs, with a step of the host between each two.

    It is captured as `torch.cuda.CUDAGraph` is.
    """

    def __init__(self, make_graph: Callable[[], Any]) -> None:
        self._make_graph = make_graph
        self._graphs: list[Any] = []
        self._steps: list[Callable[[], None]] = []
        self._begin: Callable[[Any], None] = lambda graph: None

    def capture_begin(self, *arguments: Any, **named: Any) -> None:
        """Begin the first graph."""
        self._begin = lambda graph: graph.capture_begin(*arguments, **named)
        self._add()

    def cut(self, step: Callable[[], None]) -> None:
        """End a graph, and begin the next one behind a step of the host."""
        self._graphs[-1].capture_end()
        self._steps.append(step)
        self._add()

    def capture_end(self) -> None:
        """End the last graph."""
        self._graphs[-1].capture_end()

    def replay(self) -> None:
        """Compute the pass again."""
        for number, graph in enumerate(self._graphs):
            if number:
                self._steps[number - 1]()
            graph.replay()

    def _add(self) -> None:
        self._graphs.append(self._make_graph())
        self._begin(self._graphs[-1])


class GraphRecorder:
    """Captures graphs that share memory: only one runs at a time.

    All are captured on one stream, since torch keeps a workspace for the products of each stream.
    """

    def __init__(self, device: torch.device, steps: HostSteps | None = None) -> None:
        """`steps` None: passes have no steps of the host."""
        self._device, self._steps = device, steps
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Return a graph of a function's kernels, and the function's result. Raises: RuntimeError.

        Other threads may use GPUs meanwhile.
        """
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(current):  # set again after a capture that fails
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            current.wait_stream(self._stream)
            graph = CutGraph(torch.cuda.CUDAGraph)
            cutting = nullcontext() if self._steps is None else self._steps.cut_by(graph.cut)
            with (
                cutting,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),  # type: ignore[arg-type]
            ):
                hidden = run()
        return graph, hidden


class _DecodePass(msgspec.Struct, frozen=True):
    """A decode pass of a fixed number of sequences: its graph, and where it leaves the hidden states, [S, H].

    Without the references to routers' choices a graph would use their memory again.
    """

    graph: Graph
    hidden: Tensor
    choices: list[Tensor]  # of each router, [S, K] int64; a replay writes there, too


class GraphForward:
    """A `Forward` that replays captured decode passes, and runs all others as they come."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVStorage,
        device: torch.device,
        scheduler: SchedulerConfig,
        steps: HostSteps | None = None,
    ) -> None:
        """Capture passes of up to as many sequences as are scheduled; takes about a second."""
        self._model, self._kv, self._device, self._steps = model, kv, device, steps
        self._max_blocks = -(-scheduler.max_model_len // kv.block_size)  # of a sequence
        self._passes: dict[int, _DecodePass] = {}
        # Receives the choices of all routers after a replay, [layers with routers, T, K]; may change between passes.
        self.on_choices: OnChoices | None = None
        self._sizes = captured_sizes(scheduler.max_num_seqs)
        num_bytes = len(pinned_bytes(self._largest_arrays(self._sizes[-1]), torch.device("cpu")))
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._recorder = GraphRecorder(device, steps)
        self._capture_all()

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`: one, since no other device computes at the same time."""
        return 1

    @without_gradients
    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`."""
        size = self._size_for(given)
        if size is None:
            hidden = self._model(*given.tensors(self._kv, self._device))
        else:
            self._write_inputs(given, size)
            replayed, number = self._passes[size], len(given.starts)
            replayed.graph.replay()
            hidden = replayed.hidden[:number]
            if self.on_choices is not None and replayed.choices:
                self.on_choices(torch.stack(replayed.choices)[:, :number])
        return (rows_of(hidden, rows) for rows in given.row_groups())

    def close(self) -> None:
        """Free the graphs."""
        self._passes.clear()

    @without_gradients
    def _capture_all(self) -> None:
        """Capture the largest pass first: smaller ones then find its memory free. Sizes without memory are left out."""
        problem = ""  # not the error itself: it refers to the tensors of its pass
        for size in reversed(self._sizes):
            self._write_inputs(_PADDING, size)
            choices: list[Tensor] = []
            try:
                with self._kept(choices):
                    graph, hidden = self._recorder.capture(partial(self._run_static, size, choices))
                self._passes[size] = _DecodePass(graph, hidden, choices)
            except RuntimeError as error:
                problem = _NO_MEMORY if is_out_of_memory(error) else str(error)
                if problem is not _NO_MEMORY:
                    self._passes.clear()
                    break
        largest = max(self._passes, default=0)
        if largest < self._sizes[-1]:
            which = f"decode passes of more than {largest} requests" if largest else "decode passes"
            logger.warning("%s run without CUDA graphs, which is slower: %s", which, problem)

    @contextmanager
    def _kept(self, choices: list[Tensor]) -> Iterator[None]:
        """Have routers append their choices to a list in the block."""
        blocks = [block for _, block in self._model.moe_blocks()]
        for block in blocks:
            block.on_route = lambda topk_ids, hidden: choices.append(topk_ids)
        try:
            yield
        finally:
            for block in blocks:
                block.on_route = None

    def _size_for(self, given: PassInput) -> int | None:
        """Return the captured size that holds a pass; None: it is no decode pass, or is too large."""
        number = len(given.starts)
        if self._steps is not None and not self._steps.takes_graphs:
            return None
        if len(given.token_ids) != number or given.trees or given.num_encoder_tokens or _has_chains(given.states):
            return None
        place = bisect_left(self._sizes, number)
        return self._sizes[place] if place < len(self._sizes) and self._sizes[place] in self._passes else None

    def _write_inputs(self, given: PassInput, size: int) -> None:
        host = pinned_bytes(self._arrays(given, size), self._device)
        self._inputs[: len(host)].copy_(host, non_blocking=True)

    def _arrays(self, given: PassInput, size: int) -> list[np.ndarray]:
        """Return token ids, positions and slots, [S] int64 each, then the tables: states, sequences, blocks."""
        number, block_size = len(given.starts), self._kv.block_size
        source = np.minimum(np.arange(size), number) % number  # of padding: the first row
        starts = np.array(given.starts, np.int64)
        block_counts = starts // block_size + 1
        used = [ids[:count] for ids, count in zip(given.block_ids, block_counts, strict=True)]
        last_blocks = np.array([ids[-1] for ids in used], np.int64)
        slots = np.full(size, -1, np.int64)
        slots[:number] = last_blocks * block_size + starts % block_size
        table = np.empty((4, size), np.int32)
        table[0] = np.arange(size)
        table[1] = starts[source]
        table[2] = 1
        table[3] = (np.cumsum(block_counts) - block_counts)[source]
        blocks = np.concatenate([np.array(ids, np.int32) for ids in used])
        numbers = [np.array(given.token_ids, np.int64)[source], starts[source], slots]
        return [*numbers, *self._state_arrays(given, source), table, blocks]

    def _state_arrays(self, given: PassInput, source: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of a `StateTable`: each sequence is a chain, and may store a checkpoint and its state."""
        if self._kv.states is None:
            return []
        size = len(source)
        places = np.arange(size)
        sources = np.array([use.source for use in given.states])[source]
        slots = np.full((size, 2), NO_SLOT)
        slots[: len(given.states)] = [(use.saves[0][1] if use.saves else NO_SLOT, use.target) for use in given.states]
        columns = [places, sources, 2 * places, 2 * places + 2, places + 1]
        return [np.array(columns, np.int32), np.array([np.full(2 * size, 1), slots.ravel()], np.int32)]

    def _largest_arrays(self, size: int) -> list[np.ndarray]:
        """Return the same arrays of the longest sequences, but for their numbers."""
        return [*self._arrays(_PADDING, size)[:-1], np.zeros(size * self._max_blocks, np.int32)]

    def _run_static(self, size: int, choices: list[Tensor]) -> Tensor:
        """Compute the pass whose inputs are in the buffer; `choices` has those of this run alone."""
        choices.clear()
        block_size = self._kv.block_size
        token_ids, positions, slots, *states, table, blocks = views(self._inputs, self._largest_arrays(size))
        device_table = DeviceTable(table, blocks, None, 1, block_size)
        metadata = AttentionMetadata(slots, (), block_size, _device_table=device_table)
        sequences = StateSequences((), StateTable(states[0], states[1], 1)) if states else None
        return self._model(token_ids, ForwardContext(positions, metadata, self._kv, states=sequences))


def _has_chains(states: Sequence[StateUse]) -> bool:
    """Return whether a sequence starts from a state that another one of the pass stores: that takes turns."""
    checkpoints = {slot for use in states for _, slot in use.saves}
    return any(use.source in checkpoints for use in states)


def can_capture(model: object, config: EngineConfig) -> bool:
    """Return whether decode passes of a model compute on a GPU alone, with nothing to do for the host in between."""
    return (
        isinstance(model, CausalLM)
        and launching.accepts(model.norm.weight)
        and not config.record_routing
        and config.parallel is None  # else ranks may not capture the same passes
        and (model.embed_positions is None or model.embed_positions.weight is not None)  # else the host makes them
        and _has_attention_kernels(model)
    )


def _has_attention_kernels(model: CausalLM) -> bool:
    """Return whether the GPU has kernels for the values of all layers; else attention waits for the host."""
    attention, gpu = model.config.attention, launching.gpu_of(model.norm.weight)
    widths = {heads.head_dim for heads in (attention.heads, *attention.other_heads.values())}
    return all(attention_tiles.fits(gpu, width) for width in ({attention.latent_dim} if attention.latent else widths))

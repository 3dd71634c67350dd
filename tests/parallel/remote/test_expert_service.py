"""Experts computed elsewhere give the bits of experts computed here, for any mix of clients."""

from __future__ import annotations

import struct
import threading
from contextlib import ExitStack, closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.expert_slots import add_pairs
from moeflow.kernels.weight_format import WEIGHT_FORMATS
from moeflow.parallel.remote import expert_service
from moeflow.parallel.remote.expert_service import ExpertService
from moeflow.parallel.remote.expert_work import (
    RESULT,
    WORK,
    ExpertWork,
    Selection,
    Status,
    WorkResult,
    encode_result,
    encode_work,
)
from moeflow.parallel.remote.work_client import WorkClient
from tests.parallel.links import two_ends
from tests.parallel.remote.owners import HIDDEN, NUM_EXPERTS, Owner, client_of, packed_layer, routed

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
PATIENCE_S = 30.0


@pytest.fixture
def service():
    with closing(ExpertService(num_threads=1)) as service:
        yield service


def mask(*experts: int) -> torch.Tensor:
    found = torch.zeros(NUM_EXPERTS, dtype=torch.bool)
    found[list(experts)] = True
    return found


def ask(client: WorkClient, layer: int, hidden, ids, weights, is_wanted=None) -> WorkResult:
    selection = Selection.of(ids, weights, mask(*range(NUM_EXPERTS)) if is_wanted is None else is_wanted)
    return client.submit(selection.work(layer, hidden)).result(PATIENCE_S)


@settings(max_examples=20, deadline=None)
@given(
    weight_format=st.sampled_from(WEIGHT_FORMATS),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    owner_of=st.lists(st.integers(0, 2), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
    seed=st.integers(0, 2**16),
)
def test_pairs_that_two_others_and_this_process_compute_add_up_to_the_same_bits(weight_format, sizes, owner_of, seed):
    """Each expert is at home in one of three places; all passes are on their way at once."""
    layer = packed_layer(seed, weight_format)
    chance = torch.Generator().manual_seed(seed)
    masks = [torch.tensor(owner_of) == place for place in range(3)]
    with ExitStack() as stack:
        service = stack.enter_context(closing(ExpertService(num_threads=2)))
        owners = [Owner([layer], held=found.nonzero().view(-1).tolist()) for found in masks[1:]]
        clients = [stack.enter_context(client_of(service, owner)) for owner in owners]
        passes = []
        for num_tokens in sizes:
            hidden, ids, weights = routed(chance, num_tokens)
            selections = [Selection.of(ids, weights, found) for found in masks]
            pending = [
                (selection.pairs, client.submit(selection.work(0, hidden)))
                for selection, client in zip(selections[1:], clients, strict=True)
                if len(selection.rows)
            ]
            passes.append((hidden, ids, weights, selections[0], pending))
        for hidden, ids, weights, here, pending in passes:
            pairs = torch.full((ids.numel(), HIDDEN), torch.nan)
            if len(here.rows):
                slots = {expert: expert for expert in masks[0].nonzero().view(-1).tolist()}
                work = here.work(0, hidden)
                (found,) = expert_service.compute_pairs(layer, slots, [work], NUM_EXPERTS)
                pairs[here.pairs] = found
            for positions, each in pending:
                pairs[positions] = each.result(PATIENCE_S).pairs
            assert torch.equal(add_pairs(pairs, ids), layer.compute(hidden, ids, weights))


def test_a_row_goes_once_however_many_of_its_experts_are_there():
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [2, 5, 0]])
    weights = torch.arange(9.0).view(3, 3)
    found = Selection.of(ids, weights, mask(0, 2))
    assert found.rows.tolist() == [0, 2]
    assert found.expert_ids.tolist() == [[0, NUM_EXPERTS, 2], [2, NUM_EXPERTS, 0]]
    assert found.weights.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert found.pairs.tolist() == [0, 2, 6, 8]


def test_what_has_arrived_for_a_layer_is_computed_at_once_and_what_is_alone_first(monkeypatch):
    layers = [packed_layer(0), packed_layer(1)]
    together: list[list[int]] = []
    compute, may_go, has_begun = expert_service.compute_pairs, threading.Event(), threading.Event()

    def slow(experts, slots, works, num_experts):
        together.append([work.layer for work in works])
        has_begun.set()
        assert may_go.wait(PATIENCE_S)
        return compute(experts, slots, works, num_experts)

    monkeypatch.setattr(expert_service, "compute_pairs", slow)
    chance = torch.Generator().manual_seed(0)
    with closing(ExpertService(num_threads=1)) as service, ExitStack() as stack:
        owner = Owner(layers)
        clients = [stack.enter_context(client_of(service, owner)) for _ in range(3)]
        asked = [routed(chance, number) for number in (4, 1, 2, 3)]

        def submit(client, layer, given):
            hidden, ids, weights = given
            return client.submit(ExpertWork(layer, hidden, ids, weights))

        pending = [submit(clients[0], 0, asked[0])]
        assert has_begun.wait(PATIENCE_S)
        for number, layer in enumerate((1, 0, 1)):
            pending.append(submit(clients[number], layer, asked[number + 1]))
            wait_for(lambda: len(service._queue) == len(pending) - 1)  # each client has a connection of its own
        may_go.set()
        results = [each.result(PATIENCE_S) for each in pending]
        assert together == [[0], [1, 1], [0]]
        for (hidden, ids, weights), layer, result in zip(asked, (0, 1, 0, 1), results, strict=True):
            assert torch.equal(add_pairs(result.pairs, ids), layers[layer].compute(hidden, ids, weights))


def wait_for(condition) -> None:
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come about")


def test_an_expert_that_is_not_there_is_said_and_others_get_their_results(service):
    layer = packed_layer(3)
    chance = torch.Generator().manual_seed(1)
    hidden, ids, weights = routed(chance, 3)
    with client_of(service, Owner([layer], held=(0, 1))) as client:
        assert ask(client, 0, hidden, ids, weights).status is Status.ABSENT
        found = Selection.of(ids, weights, mask(0, 1))
        result = client.submit(found.work(0, hidden)).result(PATIENCE_S)
        assert (result.status, len(result.pairs)) == (Status.DONE, len(found.pairs))


def test_a_service_computes_beside_the_passes_of_its_process(service):
    """Kernels of this thread and of the service use threads and memory of their own: bits are as ever."""
    layer, chance = packed_layer(5), torch.Generator().manual_seed(2)
    hidden, ids, weights = routed(chance, 40)
    want = layer.compute(hidden, ids, weights)
    has_ended, wrong = threading.Event(), []

    def passes():
        while not has_ended.is_set():
            if not torch.equal(layer.compute(hidden, ids, weights), want):
                wrong.append("here")

    thread = threading.Thread(target=passes)
    thread.start()
    try:
        with client_of(service, Owner([layer])) as client:
            for _ in range(200):
                assert torch.equal(add_pairs(ask(client, 0, hidden, ids, weights).pairs, ids), want)
    finally:
        has_ended.set()
        thread.join()
    assert not wrong


def altered(message: memoryview, offset: int, layout: str, value: int) -> memoryview:
    data = bytearray(message)
    struct.pack_into(layout, data, offset, value)
    return memoryview(data)


WORK_OF_ONE = ExpertWork(0, torch.ones(1, HIDDEN), torch.tensor([[0, 1]]), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (memoryview(b"short"), "work of experts of 5 bytes has no head"),
        (altered(encode_work(1, WORK_OF_ONE), 8, "<I", 9), "of layer 9 of 1"),
        (altered(encode_work(1, WORK_OF_ONE), 12, "<I", 2), "work of experts of 2 rows has 184 bytes"),
        (altered(encode_work(1, WORK_OF_ONE), 12, "<I", 0), "with 0 rows"),
        (altered(encode_work(1, WORK_OF_ONE), 16, "<I", 7), "asks for 7 of 6 experts"),
        (altered(encode_work(1, WORK_OF_ONE), 20, "<I", 64), "with 1 rows of 64 values where 32 are expected"),
        (altered(encode_work(1, WORK_OF_ONE), 32, "<q", 7), "an expert that does not exist"),
        (altered(encode_work(1, WORK_OF_ONE), 32, "<q", -1), "an expert that does not exist"),
    ],
)
def test_nonsense_ends_the_link_with_a_reason_and_the_service_lives(service, message, complaint):
    owner = Owner([packed_layer(0)])
    with two_ends() as (ours, theirs):
        served = service.serve(theirs, owner)
        ours.send_message(WORK, bytes(message))
        with pytest.raises(GroupError, match=complaint):
            ours.receive_message(RESULT, PATIENCE_S)
        served.close("")
    with client_of(service, owner) as client:
        assert ask(client, 0, *routed(torch.Generator().manual_seed(0), 2)).status is Status.DONE


def test_too_much_at_once_and_other_messages_end_the_link(service, monkeypatch):
    monkeypatch.setattr(expert_service, "MAX_WORK_BYTES", 100)
    for name, data in ((WORK, bytes(101)), ("hello", b"")):
        with two_ends() as (ours, theirs):
            served = service.serve(theirs, Owner([packed_layer(0)]))
            ours.send_message(name, data)
            with pytest.raises(GroupError, match=rf"'{name}' of {len(data)} bytes is not expected"):
                ours.receive_message(RESULT, PATIENCE_S)
            served.close("")


def test_an_owner_that_is_silent_or_gone_fails_what_is_pending_and_all_after_it():
    ends = []
    with two_ends() as (ours, theirs):
        client = WorkClient(ours, HIDDEN, NUM_EXPERTS, on_end=ends.append)
        pending = [client.submit(WORK_OF_ONE) for _ in range(2)]
        with pytest.raises(GroupError, match=r"has not sent the result of experts of MoE layer 0 within 0.05 s: it is"):
            pending[0].result(0.05)
        for each in (pending[1], client.submit(WORK_OF_ONE)):
            with pytest.raises(GroupError, match="has not sent the result of experts"):
                each.result(PATIENCE_S)
        client.close()
        assert len(ends) == 1
    with two_ends() as (ours, theirs):
        client = WorkClient(ours, HIDDEN, NUM_EXPERTS)
        pending = [client.submit(WORK_OF_ONE)]
        theirs.close()
        with pytest.raises(GroupError, match=r"closed the connection|is gone"):
            pending[0].result(PATIENCE_S)
        client.close()


@pytest.mark.parametrize("result", [WorkResult(Status.DONE, torch.ones(1, HIDDEN), 0.0, 0.0), None])
def test_a_result_of_other_work_is_refused(result):
    message = memoryview(b"x" * 40) if result is None else encode_result(0, result)
    with two_ends() as (ours, theirs):
        client = WorkClient(ours, HIDDEN, NUM_EXPERTS)
        pending = client.submit(WORK_OF_ONE)
        theirs.send_message(RESULT, message)
        with pytest.raises(GroupError, match=r"has 1 pairs where 2 are expected|not made of rows"):
            pending.result(PATIENCE_S)
        client.close()


def test_work_that_is_there_before_its_link_is_served_gets_its_result(service, monkeypatch):
    """The link's thread and the service may be through before `serve` returns."""

    class Slow(expert_service.LinkThread):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            threading.Event().wait(0.2)

    monkeypatch.setattr(expert_service, "LinkThread", Slow)
    with two_ends() as (ours, theirs):
        ours.send_message(WORK, bytes(encode_work(1, WORK_OF_ONE)))
        served = service.serve(theirs, Owner([packed_layer(0)]))
        assert len(ours.receive_message(RESULT, PATIENCE_S)) == 32 + 2 * HIDDEN * 4
        served.close("")

"""Prefixes that are read from elsewhere: tokens stay those of a request alone, whenever reads end and however far."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from moeflow.core.batch import NO_SLOT
from moeflow.core.engine_config import StateSlotsConfig
from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason, Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.scheduler.policy import make_scheduler as scheduler_of
from tests.engine.fake_runner import scheduler_config
from tests.scheduler.fake_model import FakeModel, generate_alone
from tests.scheduler.traffic import AnyTraffic, batch_request, finish_pass, make_request, make_scheduler

SIZE = 4


@dataclass
class FakeRead:
    request: Request
    start: int
    block_ids: list[int]
    state_slot: int = NO_SLOT
    is_over: bool = False
    is_late: bool = False
    is_begun: bool = True
    num_filled: int = 0
    has_state: bool = False

    def cancel(self):
        self.is_over = self.is_over or not self.is_begun


class FakePrefixes:
    """Has the first blocks of every request, in a random number; reads on command."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.model = FakeModel(SIZE)
        self.found: dict[Request, int | None] = {}
        self.reads: list[FakeRead] = []
        self.all_reads: list[FakeRead] = []
        self.has_room = True

    def expect(self, request):
        most = (request.num_tokens - 1) // SIZE
        self.found[request] = most if self.rng is None else self.rng.choice([None, 0, most, self.rng.randint(0, most)])

    def num_found(self, request):
        return self.found[request]

    def read(self, request, start, block_ids, state_slot):
        if not self.has_room:
            return None
        self.reads.append(FakeRead(request, start, list(block_ids), state_slot))
        self.all_reads.append(self.reads[-1])
        return self.reads[-1]

    def forget(self, request):
        del self.found[request]

    def end(self, read: FakeRead, num_filled: int | None = None, *, has_state: bool = True) -> None:
        self.reads.remove(read)
        read.num_filled = len(read.block_ids) if num_filled is None else num_filled
        tokens = read.request.token_ids(0, (read.start + len(read.block_ids)) * SIZE)
        for index, block_id in enumerate(read.block_ids[: read.num_filled], read.start):
            for position in range(index * SIZE, (index + 1) * SIZE):
                self.model.slots[block_id * SIZE + position % SIZE] = (position, tokens[position])
        if read.state_slot != NO_SLOT and has_state:
            self.model.states[read.state_slot] = tokens
            read.has_state = True
        read.is_over = True

    def know_all(self) -> None:
        """Answer the open requests."""
        self.found = {request: found or 0 for request, found in self.found.items()}


class TrafficWithPrefixes(AnyTraffic):
    def __init__(self) -> None:
        self.prefixes = FakePrefixes(random.Random(1))
        super().__init__(make_scheduler(self.prefixes, num_blocks=16))
        self.model = self.prefixes.model

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), max_tokens=st.integers(1, 8))
    def submit_batch(self, prompt, max_tokens):
        self.add(batch_request, prompt, max_tokens)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(rng=st.randoms(use_true_random=False))
    def one_pass(self, rng):
        batch = self.scheduler.schedule()
        if not batch:
            assert self.prefixes.reads or None in self.prefixes.found.values() or not self.prefixes.has_room
        finish_pass(self.scheduler, self.model, batch)

    @precondition(lambda self: self.prefixes.reads)
    @rule(data=st.data())
    def end_a_read(self, data):
        read = data.draw(st.sampled_from(self.prefixes.reads))
        self.prefixes.end(read, data.draw(st.integers(0, len(read.block_ids))), has_state=data.draw(st.booleans()))

    @precondition(lambda self: self.prefixes.reads)
    @rule(data=st.data())
    def be_late(self, data):
        data.draw(st.sampled_from(self.prefixes.reads)).is_late = True

    @rule(has_room=st.booleans())
    def have_room(self, has_room):
        self.prefixes.has_room = has_room

    @rule()
    def know(self):
        self.prefixes.know_all()

    def teardown(self):
        for _ in range(2000):
            self.prefixes.know_all()
            for read in [*self.prefixes.reads]:
                self.prefixes.end(read)
            batch = self.scheduler.schedule()  # also puts away the blocks read for cancelled requests
            if not self.scheduler.has_work:
                break
            finish_pass(self.scheduler, self.model, batch)
        super().teardown()
        assert not self.prefixes.found


TestTrafficWithPrefixes = TrafficWithPrefixes.TestCase
TestTrafficWithPrefixes.settings = settings(max_examples=60, stateful_step_count=60)


class TrafficWithStates(TrafficWithPrefixes):
    """The same in models with recurrent layers, with few slots or many."""

    @initialize(num_slots=st.integers(2, 9), every=st.sampled_from([4, 8]))
    def choose(self, num_slots, every):
        states = StateSlotsConfig(num_slots=num_slots, checkpoint_every=every)
        self.scheduler = make_scheduler(self.prefixes, num_blocks=16, states=states)


TestTrafficWithStates = TrafficWithStates.TestCase
TestTrafficWithStates.settings = settings(max_examples=60, stateful_step_count=60)


def run_to_end(scheduler, prefixes) -> None:
    for _ in range(200):
        if not scheduler.has_work:
            return
        for read in [*prefixes.reads]:
            prefixes.end(read)
        finish_pass(scheduler, prefixes.model, scheduler.schedule())
    pytest.fail("the scheduler does not come to an end")


def test_what_is_read_is_not_computed():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=40)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    assert not scheduler.schedule()
    scheduler.check_integrity()
    (read,) = prefixes.reads
    assert (read.start, len(read.block_ids)) == (0, 4)
    prefixes.end(read)
    batch = scheduler.schedule()
    assert [(entry.start, entry.num_tokens) for entry in batch.entries] == [(16, 2)]
    assert request.num_cached_tokens == 16
    finish_pass(scheduler, prefixes.model, batch)
    run_to_end(scheduler, prefixes)
    assert request.output_token_ids == generate_alone(list(range(18)), 5)


def test_others_overtake_who_waits_for_a_read_and_running_requests_go_on():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=12)
    running = make_request("running", [1], 30)
    scheduler.add(running)
    finish_pass(scheduler, prefixes.model, scheduler.schedule())
    long, short = make_request("long", list(range(20))), make_request("short", [5])
    scheduler.add(long)
    scheduler.add(short)
    batch = scheduler.schedule()
    assert [entry.request for entry in batch.entries] == [running, short]
    finish_pass(scheduler, prefixes.model, batch)
    prefixes.end(*prefixes.reads)
    assert long in [entry.request for entry in scheduler.schedule().entries]


@pytest.mark.parametrize("places", ["free", "all waiting"])
def test_batch_requests_begin_while_interactive_ones_wait_for_a_read(places):
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=20, max_num_seqs=2)
    chats = [make_request(f"chat {i}", [i] * 18, 2) for i in range(1 if places == "free" else 3)]
    for request in chats:
        scheduler.add(request)
    assert not scheduler.schedule()
    row = batch_request("row", [9], 3)
    scheduler.add(row)
    for _ in range(3):
        batch = scheduler.schedule()
        assert [entry.request for entry in batch.entries] == [row]
        finish_pass(scheduler, prefixes.model, batch)
    assert row.output_token_ids == generate_alone([9], 3)
    assert all(scheduler._reads.holds(request) for request in chats[:2])


@pytest.mark.parametrize("is_known", [False, True])
def test_batch_requests_that_began_meanwhile_give_way_to_who_has_waited_for_a_read(is_known):
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=10, max_num_batched_tokens=20)
    chat, row = make_request("chat", [1] * 18, 2), batch_request("row", [9] * 15, 9)
    scheduler.add(chat)
    scheduler.add(row)
    prefixes.found |= {chat: 4 if is_known else None, row: 0}
    batch = scheduler.schedule()
    assert [entry.request for entry in batch.entries] == [row]
    finish_pass(scheduler, prefixes.model, batch)
    for read in [*prefixes.reads]:
        prefixes.end(read)
    prefixes.know_all()
    scheduler.blocks.limit = 6  # memory has become short
    assert [entry.request for entry in scheduler.schedule().entries] == [chat]
    assert row.num_preemptions == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_batch_requests_pass_by_one_that_waits_for_a_read(is_known):
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=400, max_num_seqs=4, max_num_batched_tokens=40)
    long, *shorts = rows = [
        batch_request(name, [ord(name)] * size, 2) for name, size in (("a", 18), ("b", 3), ("c", 2))
    ]
    for row in rows:
        scheduler.add(row)
    prefixes.found |= {long: 4 if is_known else None} | dict.fromkeys(shorts, 0)
    batch = scheduler.schedule()
    assert [entry.request for entry in batch.entries] == shorts
    assert scheduler.waiting == [long]
    finish_pass(scheduler, prefixes.model, batch)
    prefixes.found[long] = 4
    finish_pass(scheduler, prefixes.model, scheduler.schedule())
    prefixes.end(*prefixes.reads)
    assert [(entry.request, entry.start) for entry in scheduler.schedule().entries] == [(long, 16)]


def test_a_batch_request_that_waited_for_a_read_is_the_next_to_begin():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=400, max_num_seqs=2, max_num_batched_tokens=40)
    rows = [batch_request(str(number), [number] * (30 - number), 4) for number in range(20)]
    for row in rows:
        scheduler.add(row)
    first = scheduler.batch_queue.first(())
    prefixes.found = dict.fromkeys(rows, 0) | {first: 4}
    begun = []
    for number in range(100):
        batch = scheduler.schedule()
        begun += [entry.request for entry in batch.entries if entry.request not in begun]
        finish_pass(scheduler, prefixes.model, batch)
        if number == 9:
            num_before = len(begun)
            prefixes.end(*prefixes.reads)
        late = batch_request(f"late {number}", [number] * 36, 4)
        scheduler.add(late)
        prefixes.found[late] = 0
    assert begun.index(first) == num_before > 1
    assert first.num_cached_tokens == 16
    assert first.output_token_ids == generate_alone(first.prompt_token_ids, 4)


def test_no_more_batch_requests_wait_for_reads_than_have_places():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=400, max_num_seqs=2, max_num_batched_tokens=40)
    for number in range(5):
        scheduler.add(batch_request(str(number), [number] * 10, 2))
    assert not scheduler.schedule()
    assert not scheduler.schedule()
    assert len(prefixes.reads) == 2
    run_to_end(scheduler, prefixes)


def test_room_is_left_for_a_batch_request_that_waits_for_a_read():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=40)
    long, *shorts = rows = [batch_request(str(number), [number] * size, 4) for number, size in enumerate((14, 9, 8))]
    for row in rows:
        scheduler.add(row)
    prefixes.found = {long: 3} | dict.fromkeys(shorts, 0)
    batch = scheduler.schedule()
    assert [entry.request for entry in batch.entries] == shorts[:1], (
        "5 blocks for each of the first two, 3 for the last"
    )
    finish_pass(scheduler, prefixes.model, batch)
    prefixes.end(*prefixes.reads)
    assert long in [entry.request for entry in scheduler.schedule().entries]


def test_equal_prompts_wait_for_one_read():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes)
    requests = [make_request(name, list(range(18))) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert not scheduler.schedule()
    assert len(prefixes.reads) == 1
    run_to_end(scheduler, prefixes)
    assert len(prefixes.all_reads) == 1
    for request in requests:
        assert request.num_cached_tokens == 16
        assert request.output_token_ids == generate_alone(list(range(18)), 5)


def test_only_as_many_prefixes_are_read_as_requests_have_places():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=40, max_num_seqs=2, max_num_batched_tokens=40)
    for index in range(5):
        scheduler.add(make_request(str(index), [index] * 10))
    assert not scheduler.schedule()
    assert len(prefixes.reads) == 2


@pytest.mark.parametrize("ending", ["late", "in vain"])
def test_a_request_is_computed_if_reading_takes_too_long_or_brings_nothing(ending):
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=40)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    assert not scheduler.schedule()
    (read,) = prefixes.reads
    if ending == "late":
        read.is_late = True
    else:
        prefixes.end(read, 0)
    (entry,) = scheduler.schedule().entries
    assert (entry.start, entry.num_tokens) == (0, 18)
    if ending == "late":
        assert set(entry.block_ids).isdisjoint(read.block_ids)


def test_a_request_is_computed_where_there_is_no_room_to_read():
    """Its blocks are free again at once, and nothing is taken for read."""
    prefixes = FakePrefixes()
    prefixes.has_room = False
    scheduler = make_scheduler(prefixes)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    assert not scheduler.schedule()
    scheduler.check_integrity()
    assert (scheduler.blocks.num_used, scheduler.blocks.num_cached) == (0, 0)
    prefixes.has_room = True
    (entry,) = scheduler.schedule().entries  # no second try: it is computed from its first token
    assert (entry.request, entry.start, request.num_cached_tokens) == (request, 0, 0)


def test_while_a_read_hangs_no_other_begins_and_it_keeps_its_own_blocks_alone():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=40, max_num_batched_tokens=80)
    for name in "ab":
        scheduler.add(make_request(name, [ord(name)] * 18))
    assert not scheduler.schedule()
    hanging, behind = prefixes.reads
    behind.is_begun = False
    hanging.is_late = True
    scheduler.add(make_request("c", [3] * 18))
    batch = scheduler.schedule()
    assert [(entry.start, entry.num_tokens) for entry in batch.entries] == [(0, 18)] * 3
    assert len(prefixes.all_reads) == 2
    assert set(hanging.block_ids).isdisjoint(it for entry in batch.entries for it in entry.block_ids)
    assert scheduler.blocks.num_used == len(hanging.block_ids) + 3 * scheduler.blocks.blocks_for(18)
    scheduler.check_integrity()


def test_a_cancelled_request_leaves_its_blocks_to_the_read():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    scheduler.schedule()
    scheduler.finish(request, FinishReason.CANCELLED)
    scheduler.check_integrity()
    assert scheduler.blocks.num_used == 4
    prefixes.end(*prefixes.reads)
    scheduler.schedule()
    scheduler.check_integrity()
    assert (scheduler.blocks.num_used, scheduler.blocks.num_cached) == (0, 4)


def test_a_cancelled_batch_request_leaves_its_place_while_its_read_goes_on():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, num_blocks=20, max_num_seqs=1)
    cancelled, other = batch_request("cancelled", [1] * 18), batch_request("other", [2] * 3)
    scheduler.add(cancelled)
    assert not scheduler.schedule()
    scheduler.finish(cancelled, FinishReason.CANCELLED)
    scheduler.add(other)
    prefixes.found[other] = 0
    assert [entry.request for entry in scheduler.schedule().entries] == [other]
    assert prefixes.reads


def test_a_request_that_is_sent_back_has_another_try():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=40, num_kept_blocks=0)
    old, young = make_request("old", [1] * 3, 9), make_request("young", [2] * 18)
    for request in (old, young):
        scheduler.add(request)
    finish_pass(scheduler, prefixes.model, scheduler.schedule())
    prefixes.end(*prefixes.reads, 0)  # in vain
    finish_pass(scheduler, prefixes.model, scheduler.schedule())
    assert scheduler.running == [old, young]
    scheduler.blocks.limit = 5  # memory is short for a moment
    finish_pass(scheduler, prefixes.model, scheduler.schedule())
    assert scheduler.waiting == [young]
    scheduler.blocks.give_back()  # nothing is left of its results
    scheduler.blocks.limit = scheduler.blocks.num_blocks
    scheduler.schedule()
    assert [read.request for read in prefixes.reads] == [young]
    run_to_end(scheduler, prefixes)
    assert young.output_token_ids == generate_alone([2] * 18, 5)


class Watched(Request, weakref=True):
    """One whose end can be seen."""


def test_who_has_tried_is_not_kept_when_it_has_ended():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes)
    request = Watched("a", [1] * 18, SamplingParams(max_tokens=5), 5)
    scheduler.add(request)
    run_to_end(scheduler, prefixes)
    assert request.num_cached_tokens == 16
    is_kept = weakref.ref(request)
    del request
    prefixes.all_reads.clear()
    gc.collect()
    assert is_kept() is None


def test_what_follows_blocks_of_the_pass_under_way_is_computed():
    """They are void if it fails; so nothing is read behind them."""
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=40)
    first, second = make_request("first", list(range(10))), make_request("second", list(range(18)))
    for request, found in ((first, 0), (second, 4)):
        scheduler.add(request)
        prefixes.found[request] = found
    batch = scheduler.schedule()
    assert [(entry.request, entry.start) for entry in batch.entries] == [(first, 0), (second, 8)]
    assert not prefixes.reads
    scheduler.fail(batch)
    scheduler.check_integrity()


def test_a_request_with_passes_of_its_own_is_read_likewise():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes, max_num_batched_tokens=40)
    request = make_request("a", list(range(18)))
    request.isolated_until = 1
    scheduler.add(request)
    assert not scheduler.schedule()
    assert not scheduler.schedule()
    prefixes.end(*prefixes.reads)
    assert [(entry.start, entry.num_tokens) for entry in scheduler.schedule().entries] == [(16, 2)]


def test_what_is_made_of_all_tokens_is_not_read():
    prefixes = FakePrefixes()
    scheduler = make_scheduler(prefixes)
    scheduler.add(make_request("a", list(range(18)), prompt_logprobs=0))
    assert scheduler.schedule()
    assert not prefixes.found, "nobody looks for it"


def test_prefixes_are_for_continuous_batching_alone():
    with pytest.raises(ConfigError, match="static"):
        scheduler_of(scheduler_config(policy="static", prefix_caching=False), FakePrefixes())


def with_states(prefixes, num_slots=4):
    states = StateSlotsConfig(num_slots=num_slots, checkpoint_every=8)
    return make_scheduler(prefixes, num_blocks=30, max_num_batched_tokens=40, states=states)


def test_with_states_a_request_begins_behind_the_state_that_was_read():
    prefixes = FakePrefixes()
    scheduler = with_states(prefixes)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    assert not scheduler.schedule()
    (read,) = prefixes.reads
    assert (read.start, len(read.block_ids)) == (0, 4)
    prefixes.end(read)
    batch = scheduler.schedule()
    assert [(entry.start, entry.state.source) for entry in batch.entries] == [(16, read.state_slot)]
    finish_pass(scheduler, prefixes.model, batch)
    run_to_end(scheduler, prefixes)
    assert request.output_token_ids == generate_alone(list(range(18)), 5)


@pytest.mark.parametrize(("num_filled", "has_state"), [(4, False), (3, True)])
def test_without_the_state_or_a_block_all_is_computed(num_filled, has_state):
    prefixes = FakePrefixes()
    scheduler = with_states(prefixes)
    request = make_request("a", list(range(18)))
    scheduler.add(request)
    scheduler.schedule()
    prefixes.end(*prefixes.reads, num_filled, has_state=has_state)
    batch = scheduler.schedule()
    assert [entry.start for entry in batch.entries] == [0]
    finish_pass(scheduler, prefixes.model, batch)
    run_to_end(scheduler, prefixes)
    assert request.output_token_ids == generate_alone(list(range(18)), 5)


def test_where_the_tree_has_the_blocks_the_state_alone_is_read():
    prefixes = FakePrefixes()
    scheduler = with_states(prefixes, num_slots=3)
    for name, tokens in (("a", [1] * 18), ("b", [2] * 18), ("c", [3] * 18)):  # whose states make those of a give way
        scheduler.add(make_request(name, tokens))
        run_to_end(scheduler, prefixes)
    again = make_request("again", [1] * 18)
    scheduler.add(again)
    assert not scheduler.schedule()
    (read,) = prefixes.reads
    assert (read.start, read.block_ids) == (4, [])
    run_to_end(scheduler, prefixes)
    assert again.num_cached_tokens == 16
    assert again.output_token_ids == generate_alone([1] * 18, 5)


def test_a_read_builds_on_no_block_of_the_pass_under_way():
    prefixes = FakePrefixes()
    scheduler = with_states(prefixes)
    short, long = make_request("short", [1] * 6), make_request("long", [1] * 18)
    for request in (short, long):
        scheduler.add(request)
    prefixes.found[short] = 0
    batch = scheduler.schedule()
    assert [entry.request for entry in batch.entries] == [short]
    (read,) = prefixes.reads
    assert (read.start, len(read.block_ids)) == (0, 4)
    scheduler.fail(batch)
    scheduler.check_integrity()
    run_to_end(scheduler, prefixes)
    assert long.output_token_ids == generate_alone([1] * 18, 5)


def test_a_slot_is_left_to_requests_that_wait_for_no_read():
    prefixes = FakePrefixes()
    scheduler = with_states(prefixes, num_slots=2)
    requests = [make_request(name, [token] * 18) for name, token in (("a", 1), ("b", 2))]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert [read.request for read in prefixes.reads] == requests[:1]
    assert [entry.request for entry in batch.entries] == requests[1:]
    finish_pass(scheduler, prefixes.model, batch)
    run_to_end(scheduler, prefixes)
    for request in requests:
        assert request.output_token_ids == generate_alone(request.prompt_token_ids, 5)

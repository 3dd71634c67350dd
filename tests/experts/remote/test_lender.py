"""What a lender takes from heads: their experts, and no nonsense."""

from __future__ import annotations

import re
from contextlib import closing

import msgspec
import pytest

from moeflow.core.errors import GroupError
from moeflow.experts.remote.borrowing import Borrowed, probe_lender
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import expert_bytes
from moeflow.parallel.remote.lending import LENDING, Borrowing, LenderReady, MemoryLoan, Message, Working, piece_label
from moeflow.parallel.tcp.conversation import RefusedError, hear, say
from moeflow.parallel.tcp.same_bits import own_processor, own_software
from tests.experts.remote.lenders import PATIENCE_S, TOKEN, running_lender, wait_for
from tests.parallel.links import connected
from tests.parallel.remote.owners import HIDDEN, NUM_EXPERTS, WIDTH

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
EXPERT = expert_bytes(HIDDEN, WIDTH, "bfloat16") if extension.is_available() else 0
BORROWING = Borrowing(
    software=own_software(),
    processor=own_processor(),
    cpu_isa="generic",
    hidden=HIDDEN,
    width=WIDTH,
    weight_format="bfloat16",
    is_wide=False,
    num_layers=2,
    num_experts=NUM_EXPERTS,
    num_wanted=3,
)


@pytest.fixture
def running():
    with running_lender() as found:
        yield found


def no_pause(seconds: float) -> None:
    pass


def test_memory_is_shared_by_heads_and_free_again_when_they_go(running):
    total = running.lender.free_bytes
    with (
        closing(Borrowed(running.address, TOKEN, BORROWING)) as one,
        closing(Borrowed(running.address, TOKEN, BORROWING)) as other,
    ):
        assert (one.num_slots, other.num_slots) == (3, 3)
        one.send_expert(7, memoryview(bytes(EXPERT)), no_pause)
        assert running.num_held == 1
        one.drop(7)
        assert running.num_held == 0
        left = running.lender.free_bytes
        assert left < total
        free_bytes, rates = probe_lender(running.address, TOKEN, msgspec.structs.replace(BORROWING, num_wanted=0))
        assert free_bytes == left == running.lender.free_bytes
        assert rates.round_trip_s > 0
        assert rates.bytes_per_s > 1e6
    wait_for(lambda: running.lender.free_bytes == total)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"software": "moeflow 0"}, "computes otherwise: it is moeflow .*, the head moeflow 0"),
        ({"processor": "z80"}, "the head's z80"),
        ({"cpu_isa": "sse9"}, "the head uses sse9: results would differ"),
        ({"weight_format": "int3"}, "weight format 'int3' is unknown"),
        (
            {"hidden": 1 << 20, "width": 1 << 20},
            "256.0 MiB of 256.0 MiB are not lent yet, and one expert takes",
        ),
    ],
)
def test_who_cannot_be_served_is_told_why(running, changes, reason):
    with pytest.raises(RefusedError, match=reason):
        Borrowed(running.address, TOKEN, msgspec.structs.replace(BORROWING, **changes))
    wait_for(lambda: any(re.search(f"nothing is lent: .*({reason})", line) for line in running.news))


@pytest.mark.parametrize(
    ("label", "num_bytes", "complaint"),
    [
        (piece_label(0, 0), EXPERT + 1, "are not the next piece"),
        (piece_label(0, 64), 64, "are not the next piece"),
        (piece_label(2 * NUM_EXPERTS, 0), 64, "there is no expert 12 in 2 layers of 6"),
        ("piece of expert 1", 64, "where 2 numbers follow"),
        ("piece of expert -1 0", 64, "where 2 numbers follow"),
        ("drop expert 3", 0, "is to be dropped, and is not there"),
        ("drop expert 3", 9, "is not expected"),
        ("here", 1 << 25, "is not expected"),
        ("hello", 0, "is not expected"),
    ],
)
def test_nonsense_ends_a_loan_with_a_reason_and_nothing_else(running, label, num_bytes, complaint):
    with connected(running.address[1], TOKEN) as link:
        say(link, LENDING, BORROWING)
        hear(link, LENDING, MemoryLoan, Message)
        link.send_message(label, bytes(num_bytes))
        with pytest.raises(GroupError):
            link.receive_message("taken", PATIENCE_S)
    wait_for(lambda: any(complaint in line for line in running.news))
    with closing(Borrowed(running.address, TOKEN, BORROWING)) as borrowed:
        assert borrowed.num_slots == 3


def test_a_loan_holds_no_more_than_it_has_room_for_and_nothing_twice(running):
    content = memoryview(bytes(EXPERT))
    for second in (0, 3):
        with closing(Borrowed(running.address, TOKEN, BORROWING)) as borrowed:
            for number in range(3):
                borrowed.send_expert(number, content, no_pause)
            with pytest.raises(GroupError):
                borrowed.send_expert(second, content, no_pause)
    wait_for(lambda: running.said("comes, and is there already"))
    wait_for(lambda: running.said("comes, and all 3 slots are taken"))


def test_work_is_for_those_who_have_a_loan(running):
    with connected(running.address[1], TOKEN) as link:
        say(link, LENDING, Working(b"x" * 16))
        with pytest.raises(GroupError):
            hear(link, LENDING, LenderReady, Message)
    wait_for(lambda: running.said("for a loan that does not exist"))
    with connected(running.address[1], TOKEN) as link:
        say(link, LENDING, LenderReady())
        with pytest.raises(GroupError):
            hear(link, LENDING, LenderReady, Message)
    wait_for(lambda: running.said("says LenderReady where Borrowing is expected"))


def test_one_that_borrows_for_work_and_ends_its_work_loses_its_loan(running):
    with closing(Borrowed(running.address, TOKEN, BORROWING)) as borrowed:
        client = borrowed.client(lambda _: None)
        borrowed.say_here()
        client.close()
        wait_for(lambda: running.said("has gone"))
        with pytest.raises(GroupError):
            borrowed.say_here()

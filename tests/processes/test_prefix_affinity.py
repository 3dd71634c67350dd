"""A request goes where most of its prompt is cached, unless others have much less to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.client import EngineState
from moeflow.kv.block_tables import BlockTables
from moeflow.processes.prefix_affinity import PrefixRecord, extend_hashes
from moeflow.scheduler.dispatch import MORE_RIVALS, best_of
from tests.processes.mortal_engine import Loss, World
from tests.processes.test_supervisor import check_whole, read, run, submission, supervise, tokens, until

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
NUM_CONVERSATIONS, NUM_TURNS, NEW_TOKENS, ANSWER_TOKENS = 5, 5, 5, 3


def block_hashes(token_ids, block_size) -> list[int]:
    """Return hashes of a sequence that grows token by token."""
    hashes: list[int] = []
    for stop in range(len(token_ids) + 1):
        extend_hashes(hashes, token_ids[:stop], block_size)
    return hashes


def share(record: PrefixRecord, prompt, block_size) -> float:
    return record.share(block_hashes(prompt, block_size), len(prompt))


@given(prompts=st.lists(TOKENS, min_size=1, max_size=12))
def test_it_knows_what_a_prefix_cache_has(prompts):
    """Against the real tree, through which the same prompts go one after the other."""
    record = PrefixRecord(4, 72)
    tables = BlockTables(num_blocks=72, block_size=4)
    for index, prompt in enumerate(prompts):
        request = Request(f"r{index}", prompt, SamplingParams(), max_tokens=1, stop_token_ids=frozenset(), seed=0)
        cached = tables.open(request)
        assert share(record, prompt, 4) == cached / len(prompt)
        assert tables.reserve(request, len(prompt))
        tables.share(request, len(prompt))
        tables.confirm_pass()
        tables.close(request)
        record.note(block_hashes(prompt, 4))


def test_it_forgets_what_was_unused_longest_from_its_end():
    record = PrefixRecord(2, 4)
    record.note(block_hashes([1, 1, 2, 2, 3, 3], 2))
    record.note(block_hashes([4, 4], 2))
    record.note(block_hashes([1, 1], 2))
    record.note(block_hashes([5, 5], 2))
    assert [share(record, [*prompt, 9], 2) for prompt in ([1, 1, 2, 2, 3, 3], [4, 4], [5, 5])] == [4 / 7, 2 / 3, 2 / 3]
    record.note(block_hashes([4, 4, 5, 5], 2))
    assert share(record, [1, 1, 2, 2, 9], 2) == 2 / 5


@given(first=TOKENS, second=TOKENS)
def test_prefixes_have_the_same_number_only_if_they_are_the_same(first, second):
    num_same = sum(a == b for a, b in zip(block_hashes(first, 4), block_hashes(second, 4), strict=False))
    for count, (a, b) in enumerate(zip(block_hashes(first, 4), block_hashes(second, 4), strict=False), 1):
        assert (a == b) is (first[: 4 * count] == second[: 4 * count])
        assert (a == b) is (count <= num_same)


def test_cached_prompts_outweigh_a_queue_that_is_a_little_longer():
    assert best_of([0, 0], [0.0, 0.0]) == 0
    assert best_of([2, 1], [0.0, 0.0]) == 1
    assert best_of([2, 1], [0.9, 0.0]) == 0
    assert best_of([2, 2], [0.6, 0.9]) == 1
    assert best_of([2, 1], [0.9, 0.9]) == 1
    assert best_of([2, 1], [0.4, 0.0]) == 1  # most of it has to be computed anyway
    assert best_of([MORE_RIVALS, 0], [0.9, 0.0]) == 0
    assert best_of([MORE_RIVALS + 1, 0], [0.9, 0.0]) == 1
    assert best_of([MORE_RIVALS + 15, 10], [0.9, 0.0]) == 0
    assert best_of([MORE_RIVALS + 16, 10], [0.9, 0.0]) == 1


def computed(num_replicas: int) -> tuple[int, int]:
    """Return how many prompt tokens conversations cost whose turns alternate, and in how many engines."""
    found: list[tuple[int, int]] = []

    async def body() -> None:
        world = World(num_blocks=200, max_model_len=64, max_num_batched_tokens=64)
        supervisor = await supervise(world, num_replicas=num_replicas)
        histories = [[number, *range(number, number + 7)] for number in range(NUM_CONVERSATIONS)]
        for turn in range(NUM_TURNS):
            for number, history in enumerate(histories):
                asked = submission(f"c{number}-{turn}", list(history), ANSWER_TOKENS)
                outputs = await read(supervisor, asked)
                check_whole(asked, outputs)
                history += [*tokens(outputs), *((number + turn + index) % 7 for index in range(NEW_TOKENS))]
        used = {id(engine) for engine, _ in world.submitted}
        found.append((supervisor.stats().prompt_tokens_total, len(used)))
        await supervisor.shutdown(1)

    run(body)
    return found[0]


def test_conversations_stay_with_the_replica_that_has_them_cached():
    """So two replicas compute what one does, and no token twice; and both of them have work."""
    num_tokens, _ = computed(1)
    assert computed(2) == (num_tokens, 2)


def test_of_an_engine_that_died_nothing_is_cached():
    async def body() -> None:
        world = World(num_blocks=40, max_num_batched_tokens=40)
        supervisor = await supervise(world, num_replicas=2)
        prompt = [1, 2, 3, 4] * 3
        await read(supervisor, submission("first", prompt, 2))
        assert [share(replica._prefixes, prompt, 4) for replica in supervisor._replicas] == [8 / 12, 0.0]
        world.kills = {world.num_passes: Loss.IN_PASS}
        await read(supervisor, submission("second", prompt, 2))
        await until(lambda: all(status.state is EngineState.READY for status in supervisor.replicas()))
        assert [share(replica._prefixes, prompt, 4) for replica in supervisor._replicas] == [0.0, 8 / 12]
        await supervisor.shutdown(1)

    run(body)

"""Micro-batches of requests with different lengths, without padding: MoE-Lightning's request batching.

Decides which requests share a micro-batch, not when it runs. (Source: MoE-Lightning appendix A.2, algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def form_micro_batches(
    requests: Sequence[Item],
    prompt_len: Callable[[Item], int],
    *,
    num_micro_batches: int,
    max_requests: int,
    gen_len: int,
    cache_size: int,
) -> tuple[list[list[Item]], list[Item]]:
    """Return micro-batches that are balanced in prompt tokens, and the requests that wait for the next batch.

    Longest prompt first, each request goes to the open micro-batch with the fewest prompt tokens. It waits if that
    one's K and V could outgrow `cache_size` tokens once every answer has `gen_len` tokens, or if all are closed. A
    micro-batch of `max_requests` is closed. Closed ones come first; equal prompts keep their order.

    Units: lengths and `cache_size` in tokens.     Cost: O(requests x micro-batches).
    """
    closed: list[list[Item]] = []
    still_open: list[list[Item]] = [[] for _ in range(num_micro_batches)]
    num_tokens = [0] * num_micro_batches  # prompt tokens of those still open
    waiting: list[Item] = []
    for request in sorted(requests, key=prompt_len, reverse=True):
        if not still_open:
            waiting.append(request)
            continue
        index = num_tokens.index(min(num_tokens))
        own = prompt_len(request)
        if num_tokens[index] + own + (len(still_open[index]) + 1) * gen_len > cache_size:
            waiting.append(request)
            continue
        still_open[index].append(request)
        num_tokens[index] += own
        if len(still_open[index]) == max_requests:
            closed.append(still_open.pop(index))
            num_tokens.pop(index)
    return closed + [micro_batch for micro_batch in still_open if micro_batch], waiting

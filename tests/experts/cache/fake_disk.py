"""A cache over a disk that is operated by hand: a slot holds garbage from when its load begins until it ends."""

from __future__ import annotations

from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.cache.policies import POLICIES

NUM_LAYERS, NUM_EXPERTS, SLAB_BYTES = 3, 4, 100


class FakeLoad:
    def __init__(self, job, on_done, contents):
        self.job = job
        self.on_done = on_done
        self.contents = contents
        self.has_begun = False
        self.is_cancelled = False

    def cancel(self):
        if self.has_begun:
            return False
        self.is_cancelled = True
        return True

    def begin(self):
        self.has_begun = True
        self.contents[self.job.slot] = "garbage"

    def finish(self, error=None):
        if error is None:
            self.contents[self.job.slot] = self.job.expert
        self.on_done(self.job, error)


class Disk:
    """Starts loads and leaves them lying until somebody plays them."""

    def __init__(self, num_slots):
        self.contents = ["empty"] * max(num_slots, 6)
        self.loads = []

    def start(self, jobs, on_done):
        fresh = [FakeLoad(job, on_done, self.contents) for job in jobs]
        self.loads += fresh
        return fresh

    def waiting(self):
        return [load for load in self.loads if not load.is_cancelled and not load.job.is_done]

    def finish_all(self):
        for load in self.waiting():
            load.begin()
            load.finish()


def make_cache(num_slots, policy="lru", **options):
    disk = Disk(num_slots)
    cache = ExpertCache(
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        num_slots=num_slots,
        slab_bytes=SLAB_BYTES,
        policy=POLICIES[policy](NUM_LAYERS, NUM_EXPERTS),
        start_loads=disk.start,
        **options,
    )
    return cache, disk


def use(cache, disk, layer, experts):
    """A pass through one layer."""
    lease = cache.acquire(layer, experts)
    disk.finish_all()
    lease.wait()
    lease.release()

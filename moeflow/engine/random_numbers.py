"""Random numbers that depend on a seed and a position only, never on earlier draws.

A request therefore samples the same tokens whatever shares its batch, and again after a preemption. The
generator is counter-based: splitmix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014) over a mixed seed plus a multiple of the golden ratio, in plain 64-bit integer arithmetic,
so the numbers are the same on every machine. Knows nothing of tensors or tokens.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd: splitmix64's increment


def mix(value: int) -> int:
    """Scramble 64 bits one to one: splitmix64's finalizer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to this seed and position, with all 53 bits of a double.

    The seed is mixed first, so that neighbouring seeds share no numbers.
    """
    return (mix(mix(seed) + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of a request with n > 1; completion 0 keeps the request's own.

    The others get 63 mixed bits of seed and index: always the same, and unrelated to each other.
    """
    return seed if index == 0 else mix(mix(seed ^ _GOLDEN) + index * _GOLDEN) >> 1

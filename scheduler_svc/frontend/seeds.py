"""Seeds: each sample of a request has its own, derived from the request's."""

import secrets

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def random_seed() -> int:
    """An unpredictable 64-bit seed."""
    return secrets.randbits(64)


def derive_seed(seed: int, index: int) -> int:
    """Noise key of sample `index` of a request with this seed: SplitMix64's output number `index`.

    A bijection of `seed` for each index and of `index` for each seed, so no two samples of one request share a key.
    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014 (finaliser: Stafford's mix 13).
    """
    z = (seed + (index + 1) * _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)

"""Seeds of samples."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.seeds import derive_seed, random_seed


def test_the_derivation_is_splitmix64() -> None:
    """Its first outputs for two seeds, as the published reference program prints them."""
    assert [derive_seed(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert derive_seed(1234567, 0) == 6457827717110365317


@given(st.integers(0, 2**64 - 1))
def test_samples_of_one_request_have_different_seeds_of_64_bits(seed: int) -> None:
    derived = [derive_seed(seed, index) for index in range(128)]
    assert len(set(derived)) == 128
    assert all(0 <= value < 2**64 for value in derived)


def test_random_seeds_differ_and_fit() -> None:
    seeds = {random_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)

"""The batch sizes that steps are padded to: fine enough to waste little, few enough to capture quickly."""

from collections.abc import Sequence

_FEW_ROWS = 16


def row_buckets(most: int) -> list[int]:
    """Rows of decode steps, ascending up to `most`: 1, multiples of 8, of 16 from 128, of 64 from 256.

    One row has a kernel of its own; for 2 to 7 rows products take as long as for 8.
    """
    sizes = [1, *range(8, 128, 8), *range(128, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def token_buckets(most: int) -> list[int]:
    """Tokens of mixed steps, ascending up to `most`: four to each doubling from 64 on, so that at most a fifth of a
    step is padding."""
    sizes = [16, 32, 48]
    octave = 64
    while octave < most:
        sizes += [octave * quarters // 4 for quarters in (4, 5, 6, 7)]
        octave *= 2
    return [size for size in sizes if size < most] + [most]


def mixed_rows(most: int) -> list[int]:
    """Rows of mixed steps, ascending: few, or as many as there can be."""
    return sorted({min(_FEW_ROWS, most), most})


def mixed_buckets(most_tokens: int, most_rows: int) -> list[tuple[int, int]]:
    """(tokens, rows) of mixed steps."""
    return [(tokens, rows) for tokens in token_buckets(most_tokens) for rows in mixed_rows(most_rows)]


def smallest(buckets: Sequence[int], size: int) -> int:
    """The first of ascending buckets that holds `size`."""
    return next(bucket for bucket in buckets if bucket >= size)

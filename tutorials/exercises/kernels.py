"""Exercises of tutorial 9: bytes, sums and time."""

from __future__ import annotations

from exercises.judging import by_values


def sectors(stride):
    return len({thread * stride // 32 for thread in range(32)})


SECTORS = by_values(
    sectors,
    [(4,), (8,), (16,), (32,), (36,), (100,), (16384,)],
    mistakes={
        "from 32 bytes on every thread has a sector of its own: there are never more than 32": (
            lambda stride: -(-32 * stride // 32)
        ),
        "this is one thread's share; a warp is 32 threads": lambda stride: max(1, stride // 32),
    },
)


def merge(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n, gap = n_a + n_b, mean_b - mean_a
    return n, mean_a + gap * n_b / n, m2_a + m2_b + gap**2 * n_a * n_b / n


def _plain_mean(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n, _, m2 = merge(n_a, mean_a, m2_a, n_b, mean_b, m2_b)
    return n, (mean_a + mean_b) / 2, m2


def _forgets_gap(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n, mean, _ = merge(n_a, mean_a, m2_a, n_b, mean_b, m2_b)
    return n, mean, m2_a + m2_b


def _large_squares(n_a, mean_a, m2_a, n_b, mean_b, m2_b):
    n, mean, _ = merge(n_a, mean_a, m2_a, n_b, mean_b, m2_b)
    return n, mean, m2_a + n_a * mean_a**2 + m2_b + n_b * mean_b**2 - n * mean**2


MERGE = by_values(
    merge,
    [(4, 1.0, 2.0, 4, 3.0, 1.0), (3, 0.5, 0.1, 9, -2.0, 4.0), (5, 1e8 + 1.0, 3.0, 7, 1e8 + 2.0, 2.0)],
    mistakes={
        "the halves may differ in size: weight their means by their counts": _plain_mean,
        "where the means differ, that difference is spread, too": _forgets_gap,
        "right on paper, but at a mean of 1e8 the subtraction of large squares leaves nothing": _large_squares,
    },
)


def microseconds(rows, width, bytes_per_number, terabytes_per_second):
    return 2 * rows * width * bytes_per_number / (terabytes_per_second * 1e12) * 1e6


MICROSECONDS = by_values(
    microseconds,
    [(8192, 4096, 2, 4.8), (1, 1024, 4, 0.05)],
    mistakes={
        "each number has to be read *and* written": lambda *a: microseconds(*a) / 2,
        "three reads are what the naive kernel needs, not what is needed": lambda *a: 2 * microseconds(*a),
        "microseconds are wanted, this is in seconds": lambda *a: microseconds(*a) / 1e6,
    },
)

EXERCISES = {"9.1": SECTORS, "9.2": MERGE, "9.3": MICROSECONDS}

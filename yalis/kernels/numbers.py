"""Whole numbers that launches are made of. Triton has both for kernels and hosts, at 6 µs a call, several a launch."""

from __future__ import annotations


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The least that is not below `number`, which is 1 at least."""
    return 1 << (number - 1).bit_length()

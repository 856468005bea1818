"""Host-side `cdiv` and `next_power_of_2`. Triton's own cost 6 µs a call on the host, several times per launch."""

from __future__ import annotations


def cdiv(dividend: int, divisor: int) -> int:
    """Return dividend / divisor, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two >= `value`, which must be at least 1."""
    return 1 << (value - 1).bit_length()

"""The limits of one input."""

from __future__ import annotations

#: Seconds, excluding those in which the process was ready but had no core.
LIMIT_S = 5.0
#: Wall-clock seconds after which an input is ended; more than LIMIT_S, because the machine may be busy.
WATCHDOG_S = 4 * LIMIT_S
#: Growth of the resident memory.
LIMIT_BYTES = 1 << 30
#: Address space that a child may map after its warm-up. An input far over the limit then raises MemoryError instead of
#: exhausting the memory of the machine.
ADDRESS_SPACE_BYTES = 4 << 30

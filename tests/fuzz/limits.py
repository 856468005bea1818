"""The limits of one input."""

from __future__ import annotations

#: Seconds, without those in which the input's process waited for a processor.
LIMIT_S = 5.0
#: Seconds after which an input is ended, on a machine that is busy with other things too.
WATCHDOG_S = 4 * LIMIT_S
#: Resident memory above that before the input.
LIMIT_BYTES = 1 << 30
#: What a child may map in addition, so that an input far over the limit gets a MemoryError and not this machine.
ADDRESS_SPACE_BYTES = 4 << 30

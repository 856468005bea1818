"""Start an operation on all ranks at the same time, and measure how long the slowest rank takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from yalis.comm.base import Communicator
from yalis.launch.world import World
from yalis.machine import usable_cores

#: Runs an operation. Returns its seconds, or None to have it timed by the host's clock.
Operation = Callable[[], "float | None"]

_SPIN_S = 3e-4  # sleep() may overrun by up to this
_LEAD_S = 0.02  # time for all ranks to learn the first start time
_WARMUP_PERIOD_S = 2e-3  # between starts while the duration of the operation is unknown
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SynchronizedTimer:
    """Starts operations on all ranks at once: by the clock if all ranks share one, else after a barrier."""

    def __init__(self, world: World, comm: Communicator) -> None:
        self._world, self._comm = world, comm
        boot_ids = world.all_gather_object(_BOOT_ID.read_text() if _BOOT_ID.exists() else None)
        self.shared_clock = len(set(boot_ids)) == 1 and boot_ids[0] is not None
        self._spin = _SPIN_S if world.size <= usable_cores() else 0.0
        self._pace = 0.0  # seconds the slowest rank took for one operation and its preparation

    def measure(self, prepare: Callable[[], None], operation: Operation, count: int, period: float) -> list[float]:
        """Return the seconds of each operation on its slowest rank. With a shared clock one starts every `period`."""
        start = max(self._world.all_gather_object(time.monotonic())) + _LEAD_S
        times, paces = [], []
        for _ in range(count):
            entered = time.perf_counter()
            prepare()
            start += period
            ready = time.perf_counter()
            if self.shared_clock:
                self._wait_until(start)
            else:
                self._comm.barrier()
            begin = time.perf_counter()
            seconds = operation()
            end = time.perf_counter()
            times.append(end - begin if seconds is None else seconds)
            paces.append(end - begin + ready - entered)
        all_ranks = self._world.all_gather_object([times, max(paces[1:] or paces)])
        self._pace = max(pace for _, pace in all_ranks)
        return [max(ranks) for ranks in zip(*(rank_times for rank_times, _ in all_ranks), strict=True)]

    def measure_paced(self, prepare: Callable[[], None], operation: Operation, warmup: int, count: int) -> list[float]:
        """Measure after warm-up operations, whose duration sets a period that is long enough for all ranks."""
        self.measure(prepare, operation, warmup, _WARMUP_PERIOD_S)
        return self.measure(prepare, operation, count, 1.5 * self._pace + 5e-4)

    def _wait_until(self, moment: float) -> None:
        if (left := moment - time.monotonic() - self._spin) > 0:
            time.sleep(left)
        while time.monotonic() < moment:
            pass

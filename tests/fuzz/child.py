"""The process that runs inputs. It writes a line of JSON before and after each input to a given file descriptor."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests import tokenizer_files
from tests.fuzz.configs import make_config
from tests.fuzz.limits import ADDRESS_SPACE_BYTES, LIMIT_BYTES, LIMIT_S, WATCHDOG_S
from tests.fuzz.target import open_model
from tests.fuzz.targets import TARGETS, make_input
from yalis.errors import YalisError


def main(seed: int, results: int) -> None:
    """Run the inputs that standard input lists as [target, index] lines."""
    work = [json.loads(line) for line in sys.stdin]
    warm_up()
    limit = _status("VmSize") + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with os.fdopen(results, "w", buffering=1) as out:
        for target, index in work:
            data = make_input(target, seed, index)
            out.write(json.dumps({"begin": [target, index]}) + "\n")
            out.write(json.dumps(run_input(target, data)) + "\n")


def warm_up() -> None:
    """Open a valid model and a tokenizer, so that no input is charged for imports and the compilation of kernels.

    Objects that exist afterwards are exempt from garbage collection, which every LLM runs when it is closed.
    """
    with _folder() as folder:
        tokenizer_files.save(tokenizer_files.byte_level(), folder)
        (folder / "config.json").write_text(json.dumps(make_config(Random(0))))
        open_model(folder, load="random")
    gc.collect()
    gc.freeze()


def run_input(target: str, data: bytes) -> dict[str, Any]:
    """Run one input. A watchdog ends this process, with the stack on stderr, after WATCHDOG_S."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak, to the current resident memory
    before, begin = _status("VmRSS"), _own_time()
    with _folder() as folder:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
        try:
            TARGETS[target].run(data, folder)
            outcome, message = "accepted", ""
        except YalisError as error:
            outcome, message = "refused", _shorten(str(error), folder)
        except Exception as error:
            stack = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{'/'.join(Path(stack.filename).parts[-2:])}:{stack.lineno}"
            outcome, message = "exception", f"{where}: {_shorten(f'{type(error).__name__}: {error}', folder)}"
        finally:
            faulthandler.cancel_dump_traceback_later()
    seconds, grown = _own_time() - begin, _status("VmHWM") - before
    if outcome in ("accepted", "refused") and (seconds > LIMIT_S or grown > LIMIT_BYTES):
        outcome = "time" if seconds > LIMIT_S else "memory"
    return {"outcome": outcome, "message": message, "seconds": seconds, "bytes": grown}


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shorten(message: str, folder: Path) -> str:
    """Return the start of the message, without the parts that differ from input to input."""
    return re.sub(r"\d+", "N", message[:2000].replace(str(folder), "."))[:120]


def _own_time() -> float:
    """Return a clock in seconds that excludes the time in which this thread was ready but had no core."""
    _, waited, _ = Path("/proc/self/schedstat").read_text().split()
    return time.perf_counter() - int(waited) * 1e-9


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes, such as VmRSS."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""Samples the ranks once a second, in a process of its own, so that the samples do not use memory of a rank.

python -m tests.soak.sampler FILE PID [PID ...]
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

Sample = dict[str, float]


def read_process(pid: int) -> Sample:
    """Return memory in MiB, open descriptors and threads of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(kib) / 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {
        "uss_mib": round(sizes["Private_Clean"] + sizes["Private_Dirty"], 3),  # memory that only this process uses
        "rss_mib": round(sizes["Rss"], 3),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def main(path: str, *pids: str) -> None:
    """Append a line of JSON a second to the file, with a sample of every process, until this process is ended."""
    begin = time.monotonic()
    with open(path, "w", buffering=1) as out:
        for second in range(1 << 30):
            time.sleep(max(0.0, begin + second - time.monotonic()))
            samples = [read_process(int(pid)) for pid in pids]
            out.write(json.dumps({"s": round(time.monotonic() - begin, 2), "ranks": samples}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Soak test of the server: requests of mixed lengths from clients that stay, leave, stall or are stopped.

    python -m tests.soak.serve --requests 10000      # `make serve-soak`

It fails if a token differs from offline generation, if a 429 is malformed, if KV blocks, descriptors or threads leak,
or if the memory of a rank grows by more than NOISE_BYTES per request with 95% confidence.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.multiprocess.serve_job import ServeJob, serve
from tests.soak.memory import WARM_UP, MemorySampler, format_rows
from tests.soak.sampler import read_process
from tests.soak.serve_load import ServeLoad, start_stopped_client
from tests.soak.serve_requests import make_specs
from tests.tiny_chat import save_tiny_chat
from yalis import LLM

FLAGS = ["--threads", "1", "--kv-blocks", "100", "--max-num-seqs", "8", "--max-queue", "8", "--timeout", "2"]
WORKERS = 20  # more than run and wait, so that some requests are refused
FIRST_REQUESTS = 500  # after which the server has all its threads
ROUNDS = 20  # each with another stopped client
#: A request whose answer is larger than the buffers of the connection of a stopped client.
LARGE = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "temperature": 0}
#: Growth per request that counts as noise: a run takes minutes, in which malloc's arenas still grow in steps. What the
#: server keeps of a request is many times larger.
NOISE_BYTES = 512
#: What is 0 when nothing runs.
METRICS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test; returns 1 if there are problems."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.serve", description=__doc__)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_chat(Path(folder), max_position=512)
        with LLM(str(model), threads=1) as llm:
            specs = make_specs(llm, 200, given.seed)
        with serve(Path(folder), str(model), *FLAGS, "--tp", str(given.tp)) as server:
            port = int(server.url.rpartition(":")[2])
            load = ServeLoad(port, specs, given.seed, WORKERS)
            pids = [server.process.pid, *server.worker_pids()]
            asyncio.run(load.run(FIRST_REQUESTS))
            before = _wait_for_idle(server, pids)
            start = time.monotonic()
            with MemorySampler(pids) as sampler:
                for requests in _split(given.requests - FIRST_REQUESTS):
                    stopped = start_stopped_client(port, LARGE, 2)
                    try:
                        asyncio.run(load.run(requests))
                    finally:
                        stopped.kill()
                        stopped.wait()
            seconds = time.monotonic() - start
            after = _wait_for_idle(server, pids)
            log = server.log
    rows = sampler.rows()
    growth = [_per_request(row, (given.requests - FIRST_REQUESTS) / seconds) for row in rows]
    problems = list(load.problems)
    problems += [
        f"rank {rank} grows by {one['bytes']} bytes per request"
        for rank, one in enumerate(growth)
        if one["low"] > NOISE_BYTES
    ]
    problems += [
        f"{name} is {value:g} after the last request, and was {before[name]:g}"
        for name, value in after.items()
        if value > before[name]
    ]
    problems += [line for line in log.splitlines() if "error" in line.lower()]
    result = {
        "requests": given.requests,
        "tp": given.tp,
        "flags": FLAGS,
        "clients": WORKERS,
        "seconds_of_load": round(seconds, 1),
        "counts": dict(sorted(load.counts.items())),
        "noise_bytes_per_request": NOISE_BYTES,
        "growth_per_request": growth,
        "evaluated_from_s": round(WARM_UP * sampler.samples[-1]["s"]),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "versions": {name: metadata.version(name) for name in ("torch", "fastapi", "uvicorn")},
        "idle_before": before,
        "idle_after": after,
        "ranks": rows,
        "problems": problems,
        **sampler.series(),
    }
    print(f"{given.requests} requests in {seconds:.0f} s, tp {given.tp}: {result['counts']}")
    print("\n".join(format_rows(rows)))
    for rank, one in enumerate(growth):
        print(f"rank {rank}: {one['bytes']:+} bytes per request (95% interval {one['low']:+} to {one['high']:+})")
    print("\n".join(problems or ["no wrong token, no leak, no growth"]))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if problems else 0


def _split(requests: int) -> list[int]:
    """Return the requests of each round."""
    ends = [number * requests // ROUNDS for number in range(ROUNDS + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def _per_request(row: dict[str, Any], requests_per_second: float) -> dict[str, int]:
    """Return the growth of a rank's memory in bytes per request, with its 95% interval."""
    scale = 2**20 / 60 / requests_per_second
    found = row["uss_mib"]
    return {
        name: round(found[key] * scale) for name, key in (("bytes", "per_minute"), ("low", "low"), ("high", "high"))
    }


def _wait_for_idle(server: ServeJob, pids: Sequence[int], seconds: float = 30) -> dict[str, float]:
    """Wait until nothing runs, and return the metrics, and descriptors and threads of each rank."""
    end = time.monotonic() + seconds
    while any((found := {name: server.metric(name) for name in METRICS}).values()) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1)  # connections are closed after their last request
    for rank, pid in enumerate(pids):
        sample = read_process(pid)
        found |= {f"{name} of rank {rank}": sample[name] for name in ("descriptors", "threads")}
    return found


if __name__ == "__main__":
    sys.exit(main())

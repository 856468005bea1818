"""The command line of the soak test: runs the load, samples every rank, prints a table, and writes it as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests import tokenizer_files
from tests.soak.load import Load
from tests.soak.memory import NOISE_MIB, WARM_UP, MemorySampler, find_growth, format_rows
from yalis import LLM
from yalis.engine.engine import Engine
from yalis.engine.replicas import ReplicaRouter

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "eos_token_id": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak test; returns 1 if memory grows, something leaks or a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tracemalloc", action="store_true", help="print where rank 0 allocated what it still holds")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_files.save(tokenizer_files.byte_level(), Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        with LLM(
            folder, load="random", device="cpu", dp=given.dp, pp=given.pp, tp=given.tp, threads=1, kv_blocks=200,
            max_num_seqs=16,
        ) as llm:  # fmt: skip
            result = soak(llm, given.minutes, given.seed, given.tracemalloc)
    result = {"minutes": given.minutes, "dp": given.dp, "pp": given.pp, "tp": given.tp, **result}
    print(format_result(result))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["problems"] else 0


def soak(llm: LLM, minutes: float, seed: int, trace: bool = False) -> dict[str, Any]:
    """Run the load for some minutes and return the growth of every rank and the problems found."""
    assert llm._world is not None
    pids = [member.pid for member in llm._world.members]
    load = Load(llm, seed)
    load.start()
    with MemorySampler(pids) as sampler:
        time.sleep(60 * minutes * WARM_UP)
        before = tracemalloc_snapshot(trace)
        objects = len(gc.get_objects())
        load.wait(60 * minutes * (1 - WARM_UP))
    if before is not None:
        _print_growth(before)
    load.stop()
    rows = sampler.rows()
    blocks = count_blocks(llm)
    problems = [*load.errors, *(problem for row in rows for problem in find_growth(row))]
    if any(blocks.values()) or llm.num_unfinished:
        problems.append(f"after the last request {blocks} KV blocks and {llm.num_unfinished} requests are left")
    return {
        "requests": dict(load.counts),
        "noise_mib_per_minute": NOISE_MIB,
        "evaluated_from_s": round(60 * minutes * WARM_UP),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "ranks": rows,
        "blocks_in_use": blocks,
        "problems": problems,
        "python_objects_of_rank_0": [objects, len(gc.get_objects())],
        **sampler.series(),
    }


def count_blocks(llm: LLM) -> dict[str, int]:
    """Return the KV blocks in use in rank 0's replica."""
    engine = llm._engine
    local = engine.local if isinstance(engine, ReplicaRouter) else engine
    assert isinstance(local, Engine)
    return {"rank 0": local.scheduler.blocks.in_use}


def tracemalloc_snapshot(trace: bool) -> tracemalloc.Snapshot | None:
    """Start tracemalloc and return a snapshot after ten seconds; None if it was not requested."""
    if not trace:
        return None
    tracemalloc.start(12)
    time.sleep(10)  # so that the snapshot has what the load allocates and frees all the time
    gc.collect()
    return tracemalloc.take_snapshot()


def _print_growth(snapshot: tracemalloc.Snapshot) -> None:
    gc.collect()
    for entry in tracemalloc.take_snapshot().compare_to(snapshot, "traceback")[:12]:
        print(f"{entry.size_diff / 1024:.0f} KiB in {entry.count_diff} blocks more, allocated at")
        print("\n".join(entry.traceback.format(limit=6, most_recent_first=True)))


def format_result(result: dict[str, Any]) -> str:
    """Return the growth of each rank as a table, and the problems."""
    lines = [f"{result['minutes']:g} min, dp {result['dp']} pp {result['pp']} tp {result['tp']}: {result['requests']}"]
    lines += format_rows(result["ranks"])
    return "\n".join([*lines, *result["problems"]] if result["problems"] else [*lines, "no growth, no leak"])


if __name__ == "__main__":
    sys.exit(main())

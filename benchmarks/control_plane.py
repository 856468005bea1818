"""Measure what it costs to send the plan of each step to all ranks, and to start a job. Prints JSON.

    python benchmarks/control_plane.py plans [--followers 2,8,32,64,128] [--steps 40] [--out FILE]
    python benchmarks/control_plane.py startup [--followers 8,32,64,128] [--out FILE]
    python benchmarks/control_plane.py fit PLANS_FILE [--out FILE]

Ranks are real processes of this host, which join with authenticated links and import no torch. Followers only receive.

`plans`: the driver encodes and sends a plan, then waits until all followers have answered. Schemes: `each` encodes the
message for every follower (the engine up to 0.1), `once` encodes it once, `tree` sends it through a tree. On a host
with fewer cores than ranks the wall times include waiting for a core. So the CPU times are given too: the driver's,
which is what limits a cluster, and that of one follower, which runs on its own host there. `chain` is a tree in which
each rank has one child: only one rank works at a time, so that its wall time shows the latency of a hop.

Both run in older checkouts too: PYTHONPATH=TREE python benchmarks/control_plane.py plans.

`fit`: the constants of yalis/planner/control.py, and its prediction for up to 1,024 followers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from yalis.launch.join import join
from yalis.launch.link import Link
from yalis.launch.world import World
from yalis.machine import host, revision
from yalis.scheduling.plan import LAST_SAMPLED, SequenceStep, StepPlan
from yalis.scheduling.wire import PlanDecoder, PlanEncoder
from yalis.types import SamplingParams

_WARM_UP = 5
_GAP_S = 0.01  # between steps, in which the driver of an engine waits for its GPU
_CONTEXT, _BLOCK = 1000, 64
_PROMPTS, _PROMPT_LEN = 4, 512
_PARAMS = SamplingParams(max_tokens=1000, seed=1)


def decode_plan(step: int, sequences: int) -> StepPlan:
    """Return the plan of a decode step on a GPU, where sampled tokens stay on the device."""
    length = _CONTEXT + step
    return StepPlan(
        step,
        tuple(
            SequenceStep(
                i, i, length, (LAST_SAMPLED,), kv_blocks(i, length // _BLOCK + 1), True, step, False, _PARAMS, None
            )
            for i in range(sequences)
        ),
    )


@cache
def kv_blocks(sequence: int, count: int) -> tuple[int, ...]:
    """Return the same tuple while the number of blocks does not change, as the scheduler does."""
    return tuple(range(100 * sequence, 100 * sequence + count))


def prefill_plan(step: int) -> StepPlan:
    """Return a plan that computes four new prompts of 512 tokens."""
    blocks = tuple(range(_PROMPT_LEN // _BLOCK))
    tokens = tuple((37 * i + step) % 100_000 for i in range(_PROMPT_LEN))
    return StepPlan(
        step,
        tuple(
            SequenceStep(_PROMPTS * step + i, i, 0, tokens, blocks, True, 0, False, _PARAMS, None)
            for i in range(_PROMPTS)
        ),
    )


PLANS: dict[str, Callable[[int], StepPlan]] = {
    "decode-16": lambda step: decode_plan(step, 16),
    "decode-256": lambda step: decode_plan(step, 256),
    "prefill-4x512": prefill_plan,
}


# The followers


def run_rank(size: int) -> None:
    """Body of the other ranks: do what rank 0 asks for, until it asks for nothing more."""
    world = join(size, ())
    while (work := world.all_gather_object(None)[0]) is not None:
        if work["kind"] == "startup":
            startup_operations(world, work["repeats"])
        else:
            follow(world, work)
    world.wait_rank0_left(60)
    world.close()


def follow(world: World, work: dict[str, Any]) -> None:
    """Receive and decode all plans, then send the time at which each was decoded and the CPU seconds it took."""
    links, group = open_group(world, work["fan_out"])
    decoder = PlanDecoder()
    decoded, cpu = [], []
    for _ in range(work["steps"]):
        begin = time.thread_time()
        decoder.decode(group.receive()[1])
        decoded.append(time.monotonic())
        cpu.append(time.thread_time() - begin)
        links[0].send(None)  # the driver waits for it before the next step
    links[0].send([decoded, cpu])
    group.close()


def open_group(world: World, fan_out: int) -> tuple[dict[int, Link], Any]:
    """Return the direct links, and what a follower receives from. An older checkout has direct links only."""
    if hasattr(world, "open_fan_out"):
        group = world.open_fan_out(0, fan_out)
        return group.links, group
    links = world.open_links(0)
    return links, links.get(0)


# The driver


def measure_plans(world: World, scheme: str, fan_out: int, plan_name: str, steps: int) -> dict[str, Any]:
    """Return the medians over the steps of one scheme and plan."""
    followers = world.size - 1
    links_each = followers if scheme in ("each", "once") else fan_out
    steps += _WARM_UP
    world.all_gather_object({"kind": "plans", "steps": steps, "fan_out": links_each})
    links, group = open_group(world, links_each)
    encoder = PlanEncoder()
    begun, rows = [], []
    for step in range(steps):
        time.sleep(_GAP_S)
        plan = PLANS[plan_name](step)  # as in an engine, where the scheduler has just made it
        wall, cpu = time.monotonic(), time.thread_time()
        encoded = ["plan", encoder.encode(plan)]
        encoded_cpu = time.thread_time()
        if scheme == "each":
            for link in links.values():
                link.send(encoded)
        else:
            group.send(encoded)
        rows.append((time.monotonic() - wall, time.thread_time() - cpu, encoded_cpu - cpu))
        begun.append(wall)
        for link in links.values():
            link.receive()
    answers = [link.receive() for link in links.values()]
    if group:
        group.close()
    for link in links.values():
        link.close()
    delivered = [max(times[step] for times, _ in answers) - begun[step] for step in range(_WARM_UP, steps)]
    follower_cpu = [max(cpu[step] for _, cpu in answers) for step in range(_WARM_UP, steps)]
    mean_cpu = [sum(cpu[step] for _, cpu in answers) / followers for step in range(_WARM_UP, steps)]
    walls, cpus, encodes = zip(*rows[_WARM_UP:], strict=True)
    return {
        "followers": followers,
        "scheme": scheme,
        "fan_out": min(links_each, followers),
        "plan": plan_name,
        "bytes": len(json.dumps(["plan", encoder.encode(PLANS[plan_name](steps))], separators=(",", ":"))) + 4,
        "driver_wall_us": _us(walls),
        "driver_cpu_us": _us(cpus),
        "driver_encode_cpu_us": _us(encodes),
        "delivered_wall_us": _us(delivered),
        "delivered_wall_p10_us": round(quantiles(delivered, n=10)[0] * 1e6, 1),
        "follower_cpu_us": _us(mean_cpu),
        "busiest_follower_cpu_us": _us(follower_cpu),
    }


def _us(seconds: Sequence[float]) -> float:
    return round(median(seconds) * 1e6, 1)


def run_plans(counts: Sequence[int], steps: int, fan_outs: Sequence[int], show: Callable[[Any], None]) -> list[Any]:
    """Measure all schemes; in an older checkout without the tree only `each`."""
    rows = []
    for followers in counts:
        world = start(followers + 1)
        for plan in PLANS:
            cases = [("each", 0)]
            if hasattr(world, "open_fan_out"):
                cases += [("once", 0), *(("tree", fan_out) for fan_out in fan_outs)]
                cases += [("chain", 1)] if followers <= 8 else []
            for scheme, fan_out in cases:
                rows.append(measure_plans(world, scheme, fan_out, plan, steps))
                show(rows[-1])
        world.all_gather_object(None)
        world.close()
    return rows


# Starting a job

_CONFIG = {f"setting_{i}": "a value of the configuration" for i in range(32)}  # about as long as an EngineConfig


def startup_operations(world: World, repeats: int) -> dict[str, float]:
    """Return the seconds of each operation of all ranks, the median of `repeats`, as seen by this rank."""

    def agree() -> None:
        if hasattr(world, "reduce_object"):
            world.reduce_object(_CONFIG, lambda values: values[0])
        else:
            world.all_gather_object(_CONFIG)

    def connect() -> None:
        opened = world.open_fan_out(0) if hasattr(world, "open_fan_out") else world.open_links(0)
        for link in opened.links.values() if hasattr(opened, "links") else opened.values():
            link.close()

    operations: dict[str, Callable[[], object]] = {
        "gather_number": lambda: world.all_gather_object(world.rank),
        "gather_memory": lambda: world.all_gather_object([10**10, 10**8, 10**6, 10**4, 10**10]),
        "agree_on_config": agree,
        "connect_driver": connect,
    }
    seconds = {}
    for name, operation in operations.items():
        times = []
        for _ in range(repeats):
            world.all_gather_object(None)
            begin = time.monotonic()
            operation()
            times.append(time.monotonic() - begin)
        seconds[name] = round(median(times), 5)
    return seconds


def run_startup(counts: Sequence[int], repeats: int, show: Callable[[Any], None]) -> list[Any]:
    rows = []
    for followers in counts:
        begin, cpu = time.monotonic(), time.process_time()
        world = start(followers + 1)
        row = {"followers": followers, "join": time.monotonic() - begin, "join_rank0_cpu": time.process_time() - cpu}
        world.all_gather_object({"kind": "startup", "repeats": repeats})
        row |= startup_operations(world, repeats)
        time.sleep(0.5)
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(5)
        row["heartbeats_rank0_cpu_per_s"] = (time.process_time() - cpu) / (time.monotonic() - begin)
        world.all_gather_object(None)
        begin = time.monotonic()
        world.close()
        row["close"] = time.monotonic() - begin
        rows.append({name: value if name == "followers" else round(value, 5) for name, value in row.items()})
        show(rows[-1])
    return rows


def start(size: int) -> World:
    """Start `size` - 1 further ranks of this script and return the world as rank 0."""
    return join(size, (sys.executable, os.path.abspath(__file__), "rank", str(size)))


# The model


def fit_plans(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the constants of yalis/planner/control.py, its predictions, and what was measured beside them.

    The driver's constants are a least-squares fit of its CPU time over links and sequences. The time of a hop is what
    a chain of ranks takes longer for each further rank, without the send; the 10th percentile, because on a shared
    machine the median contains waiting for a core.
    """
    import numpy as np

    from yalis.planner.control import control_time
    from yalis.planner.quantity import Quantity

    decodes = [row | {"sequences": int(row["plan"].removeprefix("decode-"))} for row in rows if "decode" in row["plan"]]
    used = [row for row in decodes if row["scheme"] in ("once", "tree")]
    factors = np.array([[1, row["sequences"], row["fan_out"]] for row in used], dtype=float)
    times = np.array([row["driver_cpu_us"] for row in used])
    (base, per_sequence, send), *_ = np.linalg.lstsq(factors, times, rcond=None)
    spread = float(np.median(np.abs(factors @ [base, per_sequence, send] / times - 1)))
    chains = {row["followers"]: row for row in decodes if row["scheme"] == "chain" and row["sequences"] == 16}
    first, last = min(chains), max(chains)
    hop = (chains[last]["delivered_wall_p10_us"] - chains[first]["delivered_wall_p10_us"]) / (last - first) - send
    cpu = {
        row["sequences"]: row["follower_cpu_us"] for row in decodes if (row["scheme"], row["followers"]) == ("tree", 2)
    }
    decode = (cpu[256] - cpu[16]) / (256 - 16)
    found = {"base": base, "per_sequence": per_sequence, "send": send, "hop": hop, "decode_per_sequence": decode}
    source = "benchmarks/reports/control/fit.json"
    constants = {
        f"control_{name}_s": Quantity.of(round(us * 1e-6, 9), "measured", source) for name, us in found.items()
    }

    def predict(followers: int, sequences: int) -> dict[str, Any]:
        time_s = control_time(constants, followers, sequences)
        measured = [
            row["driver_cpu_us"]
            for row in decodes
            if (row["followers"], row["sequences"], row["scheme"]) == (followers, sequences, "tree")
        ]
        return {
            "followers": followers,
            "sequences": sequences,
            "driver_us": round(time_s.driver * 1e6, 1),
            "driver_measured_us": measured[0] if measured else None,
            "delivery_us": round(time_s.delivery * 1e6, 1),
            "driver_of_10_ms": round(time_s.driver / 10e-3, 4),
        }

    counts = (1, 2, 8, 32, 64, 128, 256, 511, 1023)
    return {
        "constants": {name: one.to_json() for name, one in constants.items()},
        "median_error": round(spread, 4),
        "predictions": [predict(followers, sequences) for sequences in (16, 256) for followers in counts],
    }


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        run_rank(int(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plans", "startup", "fit"])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--followers", default="")
    parser.add_argument("--fan-outs", default="8", help="children of a rank in the tree, several to compare")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def show(row: Any) -> None:
        sys.stderr.write(json.dumps(row) + "\n")

    result: dict[str, Any] = {"host": host(), "revision": revision(), "command": " ".join(["python", *sys.argv])}
    if given.what == "plans":
        counts = numbers(given.followers or "1,2,4,8,32,64,128")
        result["rows"] = run_plans(counts, given.steps, numbers(given.fan_outs), show)
    elif given.what == "startup":
        result["rows"] = run_startup(numbers(given.followers or "8,32,64,128"), given.repeats, show)
    else:
        if given.file is None:
            parser.error("give the file that `plans --out FILE` has written")
        result = {"source": given.file.name, **fit_plans(json.loads(given.file.read_text())["rows"])}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

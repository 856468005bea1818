"""The slice benchmark: prefill and decode step of one rank of a split model, run alone on one device.

The rank loads random weights for its shards and runs the engine's steps; its collectives return at once. This measures
the computation of a job on many devices with one of them. Prompts are token ids of the rank's shard of the vocabulary,
because other tokens have an embedding of zeros on this rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.config import EngineConfig, GridShape
from yalis.engine.device import release_memory, resolve_block_size, resolve_device, resolve_dtype
from yalis.engine.engine import Engine
from yalis.engine.expert_choice import choose_experts, split_of
from yalis.engine.interrupts import Stopped, interrupts_held
from yalis.engine.oom import free_bytes
from yalis.engine.slice_rank import SliceRank
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.parallel.dims import rank_dims
from yalis.parallel.memory import rank_memory, spell_bytes
from yalis.parallel.plan import Split
from yalis.spec import ModelSpec, read_spec
from yalis.study import bandwidth, results
from yalis.study.latency import check_length, find_decode_steps, find_floors, size_engine
from yalis.study.peers.peer import Timing, explain_failure
from yalis.study.spread import spread
from yalis.study.topology import note_routing
from yalis.types import SamplingParams
from yalis.workloads import Workload, random_prompt


@dataclass(frozen=True)
class SlicePlan:
    """What `yalis bench slice` runs. The fields are written to the result as its parameters."""

    tp: tuple[GridShape, ...]
    workload: tuple[Workload, ...]
    pp: int = 1
    rank: int = 0
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("pp", 1), ("rank", 0), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if any(case.output_len < 2 for case in self.workload):
            raise YalisError("a workload with one output token has no decode step; give an output length of at least 2")
        for split in self.splits:
            if self.rank >= split.size:
                raise YalisError(
                    f"rank is {self.rank}, but {_name(split)} has ranks 0 to {split.size - 1}; give one of them"
                )

    @property
    def splits(self) -> list[Split]:
        return [Split(*grid, self.pp) for grid in self.tp]


def measure(
    config: EngineConfig, plan: SlicePlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    """Run the benchmark; `report` is called with progress messages.

    A slice that fails, for example because memory runs out in a step, becomes rows with its error as status. Raises
    YalisFailure if all of them fail. On Ctrl-C, raises Stopped with the result of the slices that have finished, if
    there are any.
    """
    device = resolve_device(config.device)
    config = replace(size_engine(config, plan.workload), load="random", prefix_reuse=False)
    rows: list[dict[str, Any]] = []
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        spec = read_spec(checkpoint.config, checkpoint.label)
        check_length(plan.workload, config.max_model_len or spec.max_position)
        dtype, on_gpu = resolve_dtype(config.dtype, spec.dtype, device), device.type == "cuda"
        choices = [
            choose_experts(replace(config, tp=grid, pp=plan.pp), spec, checkpoint.label, dtype.itemsize, on_gpu)
            for grid in plan.tp
        ]
        for choice in choices:
            check_memory(config, plan, spec, choice.split, dtype, device)
        report("measuring the device's bandwidth")
        rates = bandwidth.measure_rates(device, dtype)
        done, interrupt = 0, None
        try:
            for grid in plan.tp:
                release_memory(device)
                rows += _try_slice(replace(config, tp=grid, pp=plan.pp), plan, spec, checkpoint, rates, report)
                done += 1
        except KeyboardInterrupt as stop:
            if not rows:
                raise
            interrupt = stop
    if all(row["status"] != "ok" for row in rows):
        raise YalisFailure(rows[0]["status"])
    progress, plan = f"{done} of {count_of(len(plan.tp), 'slice')}", replace(plan, tp=plan.tp[:done])
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(rates),
    }
    topology = results.make_topology([0])  # one rank ran; the rows have the split that it is a slice of
    notes = note_routing(config, spec) + ([] if interrupt is None else [f"stopped after {progress}"])
    result = results.new("slice", parameters, rows, command, [bandwidth.describe_device(device)], notes, topology)
    if interrupt is not None:
        raise Stopped(f"{progress} done", result) from interrupt
    return result


def check_memory(
    config: EngineConfig, plan: SlicePlan, spec: ModelSpec, split: Split, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise YalisError if the weights and KV cache of the slice exceed the free memory of the device."""
    free = free_bytes(device)
    block_size = resolve_block_size(config.block_size, device)

    def count_bytes(split: Split) -> tuple[int, int]:
        memory = rank_memory(spec, split, plan.rank, dtype.itemsize, block_size)
        kv_blocks = config.kv_blocks or 0  # size_engine() set it, unless the user gave kv_memory
        kv_bytes = int((config.kv_memory or 0) * 2**30) or kv_blocks * memory.kv_block_bytes
        return memory.weight_bytes, kv_bytes

    weights, kv_bytes = count_bytes(split)
    if free is None or weights + kv_bytes <= free:
        return
    larger = (replace(split, rows=rows) for rows in range(split.rows + 1, spec.num_heads + 1))
    fits = next((_grid(one) for one in larger if sum(count_bytes(one)) <= free), None)
    raise YalisError(
        f"rank {plan.rank} of {config.model} with {_name(split)} does not fit {device}: it needs "
        f"{spell_bytes(weights)} for weights and {spell_bytes(kv_bytes)} for the KV cache in "
        f"{str(dtype).removeprefix('torch.')}, and {spell_bytes(free)} are free; give "
        + (f"--tp {fits} or more" if fits else "a smaller --batch, or more stages with --pp")
    )


def _name(split: Split) -> str:
    return f"tp {_grid(split)}" + (f", pp {split.stages}" if split.stages > 1 else "")


def _grid(split: Split) -> str:
    return str(split.rows) if split.cols == 1 else f"{split.rows}x{split.cols}"


def _try_slice(
    config: EngineConfig,
    plan: SlicePlan,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    rates: bandwidth.DeviceRates,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure all workloads on one slice; returns a row for each. An error becomes the status of the remaining rows."""
    split = split_of(config)
    rows: list[dict[str, Any]] = []
    report(f"{_name(split)}: loading")
    try:
        with closing(Slice(config, plan.rank, spec, checkpoint)) as part:
            check_length(plan.workload, part.engine.max_model_len)  # a small --kv-memory or --kv-blocks lowers it
            for case in plan.workload:
                rows.append(part.measure_workload(case, plan, rates, lambda text: report(f"{_name(split)}, {text}")))
    except Exception as error:  # kernels raise many types for a shape that they cannot run
        if isinstance(error, YalisError) and not isinstance(error, YalisFailure):
            raise
        left_out, status = plan.workload[len(rows) :], explain_failure(error)
        rows += [_base_row(split, plan.rank, case) | {"status": status} for case in left_out]
    return rows


class Slice:
    """An engine whose only rank is one rank of a split model."""

    def __init__(self, config: EngineConfig, rank: int, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        self.rank, self.spec = rank, spec
        self._ranks = SliceRank(rank, config, spec, checkpoint)
        self.split = self._ranks.split
        # Steps do not wait for tokens of the last stage, so a schedule without micro-batches keeps this stage busy.
        self.engine = Engine(replace(config, pp=1), spec, self._ranks, frozenset())
        self._all_reduces, self._reduced_bytes = self._ranks.count_all_reduces()

    def measure_workload(
        self, case: Workload, plan: SlicePlan, rates: bandwidth.DeviceRates, report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Run a workload `warmup + repeats` times; returns the row of its result."""
        timings: list[Timing] = []
        runner, tokens = self._ranks.runner, self._ranks.runner.vocabulary
        replays = 0
        for turn in range(plan.warmup + plan.repeats):
            report(f"{case}: repeat {turn + 1} of {plan.warmup + plan.repeats}")
            rng = random.Random(f"{plan.seed}/{case}/{turn}")
            prompts = [random_prompt(rng, case.prompt_len, len(tokens)) for _ in range(case.batch)]
            replays = runner.executor.replays
            timings.append(self._run([[tokens[index] for index in prompt] for prompt in prompts], case.output_len))
        return self._make_row(case, timings[plan.warmup :], rates) | {"replays": runner.executor.replays - replays}

    def _run(self, prompts: list[list[int]], output_len: int) -> Timing:
        """Run a batch and time every step. On a GPU, the host prepares a step while the one before it runs."""
        engine, stats = self.engine, self.engine.stats
        preempted = stats.preemptions
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, seed=0)
        start = time.perf_counter()
        answers: dict[int, list[int]] = {engine.add(prompt, params).id: [] for prompt in prompts}
        stamps: list[float] = []
        counts: list[int] = []  # tokens generated by each step
        host: list[float] = []  # host seconds of each step
        while engine.has_work:
            host_before = self._host_seconds()
            with interrupts_held():
                emitted = engine.step()
            stamps.append(time.perf_counter() - start)
            counts.append(len(emitted))
            host.append(self._host_seconds() - host_before)
            for item in emitted:
                assert item.token is not None, "no request is cancelled here"
                answers[item.request_id].append(item.token)
        first, full = find_decode_steps(counts if stats.preemptions == preempted else [], len(prompts), output_len)
        steps = [stamps[i] - stamps[i - 1] for i in full]
        return Timing(stamps[first], steps, stamps[-1], list(answers.values()), median(host[i] for i in full))

    def _host_seconds(self) -> float:
        """Return the seconds spent scheduling and launching steps; on a CPU only scheduling, as the host computes."""
        stats = self.engine.stats
        return stats.schedule_seconds + (stats.launch_seconds if self.engine.device.type == "cuda" else 0.0)

    def _make_row(self, case: Workload, timings: list[Timing], rates: bandwidth.DeviceRates) -> dict[str, Any]:
        runner = self._ranks.runner
        itemsize = runner.dtype.itemsize
        memory = rank_memory(self.spec, self.split, self.rank, itemsize, runner.block_size)
        floors = find_floors(rank_dims(self.spec, self.split, self.rank, itemsize, itemsize), case, rates)
        steps = [step for timing in timings for step in timing.steps]
        prefills = [timing.first_token for timing in timings]
        low, high = spread(steps)
        prefill_low, prefill_high = spread(prefills)
        return _base_row(self.split, self.rank, case) | {
            "status": "ok",
            "prefill_ms": 1e3 * median(prefills),
            "prefill_ms_low": 1e3 * prefill_low,
            "prefill_ms_high": 1e3 * prefill_high,
            "prefill_floor_ms": 1e3 * floors.prefill,
            "prefill_share_of_floor": floors.prefill / median(prefills),
            "decode_ms": 1e3 * median(steps),
            "decode_ms_low": 1e3 * low,
            "decode_ms_high": 1e3 * high,
            "floor_ms": 1e3 * floors.decode,
            "share_of_floor": floors.decode / median(steps),
            "host_ms": 1e3 * median(timing.host for timing in timings if timing.host is not None),
            "weight_bytes": runner.weight_bytes,
            "kv_token_bytes": memory.kv_token_bytes,
            "all_reduces": self._all_reduces,
            "all_reduce_bytes": case.batch * self._reduced_bytes,
        }

    def close(self) -> None:
        self.engine.close()


def _base_row(split: Split, rank: int, case: Workload) -> dict[str, Any]:
    return results.empty_row("slice") | {
        "tp": split.per_stage,
        "columns": split.cols,
        "pp": split.stages,
        "rank": rank,
        **asdict(case),
    }

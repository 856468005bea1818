"""The pipeline benchmark: idle time of pipeline stages during the prefill of a batch split into micro-batches.

With m equal micro-batches over p equal stages, each stage works in m of m + p - 1 time slots, so that the pipeline
bubble is (p - 1) / (m + p - 1) of its time. One token is generated for each prompt, and the time of a run is from the
start of the first micro-batch to the token of the last.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, with_block_size
from yalis.engine.expert_choice import split_of
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.study import bandwidth, results
from yalis.study.spread import spread
from yalis.study.topology import llm_topology
from yalis.types import SamplingParams


@dataclass(frozen=True)
class PipelinePlan:
    """What `yalis bench pipeline` runs. The fields are written to the result as its parameters."""

    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    prompts: int = 8
    prompt_len: int = 128
    warmup: int = 1
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("prompts", 1), ("prompt_len", 1), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        invalid = [m for m in self.micro_batches if m < 1 or self.prompts % m]
        if invalid or not self.micro_batches:
            raise YalisError(
                f"{self.prompts} prompts cannot be split into {invalid[0] if invalid else 'no'} equal micro-batches; "
                "give divisors of the number of prompts, such as --cuts 1,2,4,8"
            )


@dataclass(frozen=True)
class PipelineRun:
    """One prefill of all prompts."""

    seconds: float
    busy: tuple[float, ...]  # busy seconds of each stage


def measure(
    config: EngineConfig, plan: PipelinePlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    """Run the benchmark; `report` is called with progress messages."""
    if config.pp < 2 or config.dp > 1:
        raise YalisError(f"pp is {config.pp} and dp {config.dp}; give --pp 2 or more, and omit --dp")
    if resolve_device(config.device).type != "cpu":
        raise YalisError("bench pipeline measures busy time on the host, so it needs a CPU; give --device cpu")
    tokens = plan.prompts * plan.prompt_len
    config = replace(
        with_block_size(config)[0],
        max_num_seqs=max(config.max_num_seqs, plan.prompts),
        max_batch_tokens=max(config.max_batch_tokens, tokens),
        micro_batches=max(plan.micro_batches),
        prefix_reuse=False,
    )
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        rng = random.Random(plan.seed)
        runs: dict[int, list[PipelineRun]] = {m: [] for m in plan.micro_batches}
        for turn in range(plan.warmup + plan.repeats):
            for m in plan.micro_batches:  # interleaved, so that a machine that slows down affects all of them
                report(f"repeat {turn + 1} of {plan.warmup + plan.repeats}, {m} micro-batches")
                prompts = [rng.choices(range(llm.spec.vocab_size), k=plan.prompt_len) for _ in range(plan.prompts)]
                run = _run(llm, m, prompts)
                if turn >= plan.warmup:
                    runs[m].append(run)
        device = {**bandwidth.describe_device(llm.device), "ranks": config.tp[0] * config.tp[1] * config.pp}
        topology = llm_topology(llm)
    base = median(run.seconds for run in runs[plan.micro_batches[0]])
    rows = [_row(config.pp, m, runs[m], base) for m in plan.micro_batches]
    parameters = {**asdict(plan), "engine": asdict(config)}
    return results.new("pipeline", parameters, rows, command, [device], topology=topology)


def _run(llm: LLM, micro_batches: int, prompts: list[list[int]]) -> PipelineRun:
    llm.set_micro_batches(micro_batches)
    split = split_of(llm.config)
    before = llm.rank_reports()
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
    seconds = time.perf_counter() - start
    busy = [0.0] * split.stages
    for old, new in zip(before, llm.rank_reports(), strict=True):
        coords = split.coords(new.rank)
        if coords.row == coords.col == 0:
            busy[coords.stage] += new.busy_seconds - old.busy_seconds
    return PipelineRun(seconds, tuple(busy))


def _row(stages: int, micro_batches: int, runs: list[PipelineRun], base: float) -> dict[str, Any]:
    seconds = median(one.seconds for one in runs)
    low, high = spread([one.seconds for one in runs])
    idle = median(1 - sum(one.busy) / (stages * one.seconds) for one in runs)
    return results.empty_row("pipeline") | {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": seconds,
        "seconds_low": low,
        "seconds_high": high,
        "idle_share": idle,
        "ideal_idle_share": (stages - 1) / (micro_batches + stages - 1),
        "busy_seconds": [median(one.busy[stage] for one in runs) for stage in range(stages)],
        "speedup": base / seconds,
    }

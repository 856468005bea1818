"""The pipeline benchmark: how long stages stand idle while a batch of prompts passes through them in micro-batches.

With m like micro-batches over p like stages each stage works m of the m + p - 1 turns, so (p - 1) / (m + p - 1) of its
time is idle. The prompts are the same for every m, one token is generated for each, and the time of a pass runs from
the first micro-batch's start to the last one's token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from yalis import results
from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, with_block_size
from yalis.engine.engine import Engine
from yalis.engine.llm import LLM
from yalis.errors import YalisError
from yalis.study import bandwidth
from yalis.study.spread import spread
from yalis.study.topology import topology_of
from yalis.types import SamplingParams


@dataclass(frozen=True)
class PipelinePlan:
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
        odd = [m for m in self.micro_batches if m < 1 or self.prompts % m]
        if odd or not self.micro_batches:
            raise YalisError(
                f"{self.prompts} prompts cannot be cut into {odd[0] if odd else 'no'} like micro-batches; give numbers "
                "that divide them, such as --cuts 1,2,4,8"
            )


@dataclass(frozen=True)
class Pass:
    """One pass of all prompts."""

    seconds: float
    busy: tuple[float, ...]  # of each stage


def measure(
    config: EngineConfig, plan: PipelinePlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    if config.pp < 2 or config.dp > 1:
        raise YalisError(f"pp is {config.pp} and dp {config.dp}; give --pp 2 or more, and leave --dp out")
    if resolve_device(config.device).type != "cpu":
        raise YalisError("bench pipeline times stages on the host, which computes only on a CPU; give --device cpu")
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
        engine = llm._engine
        assert isinstance(engine, Engine)
        draw = random.Random(plan.seed)
        passes: dict[int, list[Pass]] = {m: [] for m in plan.micro_batches}
        for number in range(plan.warmup + plan.repeats):
            for m in plan.micro_batches:  # in turns, so that a machine that slows down slows all of them
                report(f"repeat {number + 1} of {plan.warmup + plan.repeats}, {m} micro-batches")
                prompts = [draw.choices(range(llm.spec.vocab_size), k=plan.prompt_len) for _ in range(plan.prompts)]
                passed = _pass(llm, engine, m, prompts)
                if number >= plan.warmup:
                    passes[m].append(passed)
        device = {**bandwidth.describe_device(llm.device), "ranks": config.tp[0] * config.tp[1] * config.pp}
        topology = topology_of(llm._world)
    base = median(one.seconds for one in passes[plan.micro_batches[0]])
    rows = [_row(config.pp, m, passes[m], base) for m in plan.micro_batches]
    parameters = {**asdict(plan), "engine": asdict(config)}
    return results.new("pipeline", parameters, rows, command, [device], topology=topology)


def _pass(llm: LLM, engine: Engine, micro_batches: int, prompts: list[list[int]]) -> Pass:
    engine.set_micro_batches(micro_batches)
    stage_of = engine.ranks.split.coords
    before = engine.reports()
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    seconds = time.perf_counter() - start
    busy = [0.0] * engine.ranks.split.stages
    for old, new in zip(before, engine.reports(), strict=True):
        coords = stage_of(new.rank)
        if coords.row == coords.col == 0:
            busy[coords.stage] += new.busy_seconds - old.busy_seconds
    return Pass(seconds, tuple(busy))


def _row(stages: int, micro_batches: int, passes: list[Pass], base: float) -> dict[str, Any]:
    seconds = median(one.seconds for one in passes)
    low, high = spread([one.seconds for one in passes])
    idle = median(1 - sum(one.busy) / (stages * one.seconds) for one in passes)
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": seconds,
        "seconds_low": low,
        "seconds_high": high,
        "idle_share": idle,
        "ideal_idle_share": (stages - 1) / (micro_batches + stages - 1),
        "busy_seconds": [median(one.busy[stage] for one in passes) for stage in range(stages)],
        "speedup": base / seconds,
    }

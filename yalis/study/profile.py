"""Where the time of a workload goes on every rank: matmul, attention, communication, other kernels, and gaps.

A run is watched twice: while its prompts are computed, and for some decode steps around the middle of its output. What
watching costs is told too: the decode steps before go unwatched.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from yalis import results
from yalis.checkpoint.resolve import open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, resolve_dtype
from yalis.engine.engine import Engine
from yalis.engine.llm import LLM
from yalis.engine.replica_ranks import split_of
from yalis.engine.step_profiler import DECODE, PHASES, PREFILL, Profile, RankProfile
from yalis.errors import YalisError, YalisFailure
from yalis.kernels.native import now
from yalis.spec import read_spec
from yalis.study import bandwidth
from yalis.study.latency import LatencyPlan, size_engine
from yalis.study.scaling.settings import Setting
from yalis.study.topology import describe_oversubscription, topology_of
from yalis.study.workloads import Workload, random_prompt
from yalis.types import SamplingParams

#: The parts of a phase, in the order in which they are told and stacked.
PARTS = ("matmul", "attention", "communication", "other", "idle")
#: How far the parts together may be from the wall time.
TOLERANCE = 0.02
# Unwatched tokens of each sequence from which a decode step's time is known.
_ENOUGH_UNWATCHED = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class ProfilePlan:
    workload: Workload = Workload(8, 64, 64)  # noqa: RUF009  it is frozen
    steps: int = 32  # decode steps to watch in each repeat
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if self.workload.output_len < 3:
            raise YalisError(
                f"workload {self.workload} has too few decode steps to watch; give an output of at least 3 tokens"
            )

    @property
    def watched_steps(self) -> int:
        """One more than these is watched, since the first of a watch has nothing prepared for it."""
        return min(self.steps, self.workload.output_len - 2)


@dataclass
class Seen:
    """What all ranks saw of one phase, over the repeats."""

    watches: list[tuple[float, list[RankProfile]]] = field(default_factory=list)  # rank 0's wall time in ns, by rank

    def rows(self, phase: str, batch: int) -> list[Row]:
        return [self._row(phase, rank, batch) for rank in range(len(self.watches[0][1]))]

    def _row(self, phase: str, rank: int, batch: int) -> Row:
        spent: dict[str, int] = dict.fromkeys(PARTS, 0)
        everything, wall, steps, sequences = 0, 0.0, 0, 0
        for seconds, watched in self.watches:
            wall += seconds
            everything += sum(step.total_ns for step in watched[rank].steps)
            for step in kept(watched[rank], phase):
                steps, sequences = steps + 1, sequences + step.info.num_sequences
                spent["idle"] += step.idle_ns
                for category, ns in step.category_ns.items():
                    spent[category] += ns
        # Prefill is told whole; of decode, what it takes to give every sequence a token.
        times = len(self.watches) if phase == PREFILL else sequences / batch
        row: Row = {"phase": phase, "rank": rank, "steps": steps, "ms": sum(spent.values()) / times / 1e6}
        row.update({f"{part}_ms": ns / times / 1e6 for part, ns in spent.items()})
        row["accounted"] = everything / wall
        return row

    def names(self, phase: str) -> list[list[dict[str, Any]]]:
        """For each rank, the names that took longest in the last repeat, as shares of what all ran."""
        told = []
        for watched in self.watches[-1][1]:
            whole = sum(step.total_ns for step in watched.steps if step.info.phase == phase)
            told.append([{**asdict(one), "share": one.ns / whole} for one in watched.names[phase]])
        return told


def kept(watched: RankProfile, phase: str) -> list[Any]:
    """The steps that count: of decode, not the first."""
    own = [step for step in watched.steps if step.info.phase == phase]
    return own[1:] if phase == DECODE else own


def measure(
    config: EngineConfig, plan: ProfilePlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    """Run and watch the workload; `report` hears what it is doing."""
    if config.dp > 1:
        raise YalisError("profile watches one replica; leave --dp out")
    case = plan.workload
    config = replace(size_engine(config, LatencyPlan(workload=(case,))), prefix_reuse=False)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        limit = config.max_model_len or read_spec(checkpoint.config, checkpoint.label).max_position
    if case.total_len > limit:
        raise YalisError(f"a sequence of {case} has {case.total_len} tokens, but the context holds {limit}; give less")
    seen: dict[str, Seen] = defaultdict(Seen)
    unwatched: list[float] = []
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        engine = llm._engine
        assert isinstance(engine, Engine)
        for turn in range(plan.warmup + plan.repeats):
            counts = turn >= plan.warmup
            report(f"{case}: {f'repeat {turn - plan.warmup + 1}/{plan.repeats}' if counts else 'warm-up'}")
            rng = random.Random(f"{plan.seed}/{case}/{turn}")
            prompts = [random_prompt(rng, case.prompt_len, llm.spec.vocab_size) for _ in range(case.batch)]
            found, alone = _run(llm, engine, plan, prompts)
            if counts:
                for phase, watch in found.items():
                    seen[phase].watches.append(watch)
                unwatched += alone
        device = bandwidth.describe_device(llm.device)
        dtype = resolve_dtype(config.dtype, llm.spec.dtype, resolve_device(config.device))
        topology = topology_of(llm._world)
    rows = [row for phase in PHASES for row in seen[phase].rows(phase, case.batch)]
    decode_ms = max(row["ms"] for row in rows if row["phase"] == DECODE)
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "split": _label(config),
        "over_ranks": over_ranks(rows),
        "names": {phase: seen[phase].names(phase) for phase in PHASES},
        "unwatched_decode_ms": sum(unwatched) / len(unwatched) / 1e6 if unwatched else None,
        "watching_costs": decode_ms / (sum(unwatched) / len(unwatched) / 1e6) - 1 if unwatched else None,
    }
    result = results.new("profile", parameters, rows, command, [device], topology=topology)
    return replace(result, notes=list(_notes(result)))


def _run(
    llm: LLM, engine: Engine, plan: ProfilePlan, prompts: list[list[int]]
) -> tuple[dict[str, tuple[float, list[RankProfile]]], list[float]]:
    """What was seen of each phase beside its wall time, and the nanoseconds of an unwatched decode step, if known."""
    case, stats = plan.workload, llm.stats
    before, preempted = stats.output_tokens, stats.preemptions

    def tokens_each() -> float:
        return (stats.output_tokens - before) / case.batch

    def seen_until(done: Callable[[], bool]) -> tuple[float, list[RankProfile]]:
        begin = now()
        while not done():
            llm.poll()
        profiles = engine.stop_profiling()
        return profiles[0].end_ns - begin, profiles

    steps = engine.start_profiling()
    ids = [llm.submit(prompt, SamplingParams(max_tokens=case.output_len, ignore_eos=True)) for prompt in prompts]
    prefill = seen_until(lambda: Profile(steps).prompt_tokens >= case.batch * case.prompt_len)
    middle = 1 + (case.output_len - 1 - plan.watched_steps) // 2
    llm.poll()
    begin, first = now(), tokens_each()
    while tokens_each() < middle - 1:
        llm.poll()
    alone = [(now() - begin) / (tokens_each() - first)] if tokens_each() - first >= _ENOUGH_UNWATCHED else []
    steps = engine.start_profiling()
    wanted = case.batch * (plan.watched_steps + 1)
    decode = seen_until(lambda: Profile(steps).decode_tokens >= wanted or llm.num_unfinished < case.batch)
    for id in ids:
        llm.cancel(id)
    while llm.num_unfinished:
        llm.poll()
    if stats.preemptions > preempted or not kept(decode[1][0], DECODE):
        raise YalisFailure(
            f"a batch of {case.batch} never decoded all at once, so its steps tell nothing; "
            "give a larger --kv-memory, --kv-blocks or --max-batch-tokens, or a smaller --workload"
        )
    return {PREFILL: prefill, DECODE: decode}, alone


def _label(config: EngineConfig) -> str:
    """ "tp2 nvrar"; what --allreduce auto chose is not told."""
    split = split_of(config)
    named = split.size > 1 and config.allreduce != "auto"
    return Setting(split).label + (f" {config.allreduce}" if named else "")


def over_ranks(rows: list[Row]) -> list[dict[str, Any]]:
    """For each phase and part: the most and the mean over ranks, and how far apart those are."""
    told = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        for part in ("", *PARTS):
            times = [row[f"{part}_ms" if part else "ms"] for row in rows if row["phase"] == phase]
            mean = sum(times) / len(times)
            told.append(
                {
                    "phase": phase,
                    "part": part or "all",
                    "max_ms": max(times),
                    "mean_ms": mean,
                    "imbalance": max(times) / mean if mean else 1.0,
                }
            )
    return told


def _notes(result: results.Result) -> list[str]:
    notes = [
        f"{row['phase']} on rank {row['rank']}: the parts add up to {row['accounted']:.1%} of the wall time"
        for row in result.rows
        if abs(row["accounted"] - 1) > TOLERANCE
    ]
    if oversubscribed := describe_oversubscription(result):
        notes.append(
            f"{oversubscribed}: what ranks wait for each other shows what sharing costs, not how the split scales"
        )
    return notes

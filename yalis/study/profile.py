"""Splits the time of a workload on every rank into matmul, attention, communication, other kernels and idle time.

Each run is profiled twice: during prefill, and for some decode steps around the middle of the output. The decode steps
in between run without the profiler, which gives its overhead.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from yalis.checkpoint.resolve import open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, resolve_dtype
from yalis.engine.expert_choice import resolve_experts, split_of
from yalis.engine.llm import LLM
from yalis.engine.step_profiler import DECODE, PHASES, PREFILL, RankProfile, StepProfile
from yalis.errors import YalisError, YalisFailure
from yalis.kernels.native import now
from yalis.spec import read_spec
from yalis.study import bandwidth, results
from yalis.study.latency import size_engine
from yalis.study.results.kinds.profile import CATEGORIES, summarize_ranks
from yalis.study.scaling.settings import Setting
from yalis.study.topology import llm_topology, note_routing
from yalis.types import SamplingParams
from yalis.workloads import Workload, random_prompt

#: Largest relative difference between the sum of the categories and the wall time that needs no note.
TOLERANCE = 0.02
# Unprofiled decode steps that are needed to report the overhead of the profiler.
_MIN_UNPROFILED = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class ProfilePlan:
    """What `yalis profile` runs. The fields are written to the result as its parameters."""

    workload: Workload = Workload(8, 64, 64)  # noqa: RUF009  it is frozen
    steps: int = 32  # decode steps to profile in each repeat
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if self.workload.output_len < 3:
            raise YalisError(
                f"workload {self.workload} has too few decode steps to profile; give an output of at least 3 tokens"
            )

    @property
    def counted_steps(self) -> int:
        """Decode steps that count. One more is profiled first: no step before it overlapped its scheduling."""
        return min(self.steps, self.workload.output_len - 2)


PhaseRun = tuple[int, list[RankProfile]]  # wall time of rank 0 in nanoseconds, and the profile of each rank


@dataclass
class PhaseProfile:
    """The profiles of one phase over all repeats."""

    runs: list[PhaseRun] = field(default_factory=list)

    def rows(self, phase: str, batch: int) -> list[Row]:
        return [self._row(phase, rank, batch) for rank in range(len(self.runs[0][1]))]

    def _row(self, phase: str, rank: int, batch: int) -> Row:
        category_ns: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        total_ns, wall_ns, steps, sequences = 0, 0, 0, 0
        for run_ns, ranks in self.runs:
            wall_ns += run_ns
            total_ns += sum(step.total_ns for step in ranks[rank].steps)
            for step in phase_steps(ranks[rank], phase):
                steps, sequences = steps + 1, sequences + step.info.num_sequences
                category_ns["idle"] += step.idle_ns
                for category, ns in step.category_ns.items():
                    category_ns[category] += ns
        # Prefill is reported as a whole, decode per token of every sequence.
        times = len(self.runs) if phase == PREFILL else sequences / batch
        row: Row = {"phase": phase, "rank": rank, "steps": steps, "ms": sum(category_ns.values()) / times / 1e6}
        row.update({f"{category}_ms": ns / times / 1e6 for category, ns in category_ns.items()})
        row["accounted"] = total_ns / wall_ns
        row["expert_pairs"] = sum(ranks[rank].expert_pairs for _, ranks in self.runs) or None
        return row

    def names(self, phase: str) -> list[list[dict[str, Any]]]:
        """Return for each rank the kernels or operations that took longest in the last repeat, with their shares."""
        names = []
        for profile in self.runs[-1][1]:
            total = sum(step.total_ns for step in profile.steps if step.info.phase == phase)
            names.append([{**asdict(one), "share": one.ns / total} for one in profile.names[phase]])
        return names


def phase_steps(profile: RankProfile, phase: str) -> list[StepProfile]:
    """Return the steps of a phase, without the first decode step."""
    steps = [step for step in profile.steps if step.info.phase == phase]
    return steps[1:] if phase == DECODE else steps


def measure(
    config: EngineConfig, plan: ProfilePlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    """Run and profile the workload; `report` is called with progress messages."""
    if config.dp > 1:
        raise YalisError("profile runs one replica; omit --dp")
    case = plan.workload
    config = replace(size_engine(config, (case,)), prefix_reuse=False)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        spec = read_spec(checkpoint.config, checkpoint.label)
        config = resolve_experts(config, spec, checkpoint.label)
        limit = config.max_model_len or spec.max_position
    if case.total_len > limit:
        raise YalisError(
            f"a sequence of {case} has {case.total_len} tokens, but the context length is {limit}; give shorter lengths"
        )
    phases: dict[str, PhaseProfile] = defaultdict(PhaseProfile)
    unprofiled: list[float] = []  # nanoseconds of a decode step
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        for turn in range(plan.warmup + plan.repeats):
            counts = turn >= plan.warmup
            report(f"{case}: {f'repeat {turn - plan.warmup + 1}/{plan.repeats}' if counts else 'warm-up'}")
            rng = random.Random(f"{plan.seed}/{case}/{turn}")
            prompts = [random_prompt(rng, case.prompt_len, llm.spec.vocab_size) for _ in range(case.batch)]
            runs, step_ns = _run(llm, plan, prompts)
            if counts:
                for phase, run in runs.items():
                    phases[phase].runs.append(run)
                unprofiled += step_ns
        device = bandwidth.describe_device(llm.device)
        dtype = resolve_dtype(config.dtype, llm.spec.dtype, resolve_device(config.device))
        topology, routing = llm_topology(llm), note_routing(config, llm.spec)
    rows = [row for phase in PHASES for row in phases[phase].rows(phase, case.batch)]
    decode_ms = max(row["ms"] for row in rows if row["phase"] == DECODE)
    unprofiled_ms = sum(unprofiled) / len(unprofiled) / 1e6 if unprofiled else None
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "split": _label(config),
        "over_ranks": summarize_ranks(rows),
        "names": {phase: phases[phase].names(phase) for phase in PHASES},
        "unprofiled_decode_ms": unprofiled_ms,
        "profiling_overhead": None if unprofiled_ms is None else decode_ms / unprofiled_ms - 1,
    }
    result = results.new("profile", parameters, rows, command, [device], topology=topology)
    return replace(result, notes=[*_notes(result), *routing])


def _run(llm: LLM, plan: ProfilePlan, prompts: list[list[int]]) -> tuple[dict[str, PhaseRun], list[float]]:
    """Profile both phases of one run.

    Returns the profiles by phase, and a list with the nanoseconds of an unprofiled decode step if there were enough."""
    case, stats = plan.workload, llm.stats
    tokens_before, preemptions_before = stats.output_tokens, stats.preemptions

    def tokens_per_sequence() -> float:
        return (stats.output_tokens - tokens_before) / case.batch

    with llm.profile() as prefill:
        ids = [llm.submit(prompt, SamplingParams(max_tokens=case.output_len, ignore_eos=True)) for prompt in prompts]
        prefill_start = now()
        while prefill.prompt_tokens < case.batch * case.prompt_len:
            llm.poll()
    middle = 1 + (case.output_len - 1 - plan.counted_steps) // 2
    llm.poll()
    start, first = now(), tokens_per_sequence()
    while tokens_per_sequence() < middle - 1:
        llm.poll()
    steps = tokens_per_sequence() - first
    step_ns = [(now() - start) / steps] if steps >= _MIN_UNPROFILED else []
    with llm.profile() as decode:
        decode_start = now()
        num_tokens = case.batch * (plan.counted_steps + 1)
        while decode.decode_tokens < num_tokens and llm.num_unfinished >= case.batch:
            llm.poll()
    for id in ids:
        llm.cancel(id)
    while llm.num_unfinished:
        llm.poll()
    if stats.preemptions > preemptions_before or not phase_steps(decode.ranks[0], DECODE):
        raise YalisFailure(
            f"the batch of {case.batch} never decoded in one step, so there is nothing to report; "
            "give a larger --kv-memory, --kv-blocks or --max-batch-tokens, or a smaller --workload"
        )
    runs = {
        PREFILL: (prefill.ranks[0].end_ns - prefill_start, prefill.ranks),
        DECODE: (decode.ranks[0].end_ns - decode_start, decode.ranks),
    }
    return runs, step_ns


def _label(config: EngineConfig) -> str:
    """Return the split and the all-reduce, such as "tp2 nvrar"; only the split if --allreduce is auto."""
    split = split_of(config)
    experts = " ep" if split.expert_parallel else ""
    named = split.size > 1 and config.allreduce != "auto"
    return Setting(split).label + experts + (f" {config.allreduce}" if named else "")


def _notes(result: results.Result) -> list[str]:
    notes = [
        f"{row['phase']} on rank {row['rank']}: the categories add up to {row['accounted']:.1%} of the wall time"
        for row in result.rows
        if abs(row["accounted"] - 1) > TOLERANCE
    ]
    if oversubscribed := results.describe_oversubscription(result):
        notes.append(f"{oversubscribed}: waiting for other ranks shows the cost of sharing, not how the split scales")
    return notes

"""Runs the search of `yalis plan --machine` and makes a result of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from yalis.errors import count_of
from yalis.perfmodel.experts import distinct_experts
from yalis.planner.expert_times import ASSUMPTIONS
from yalis.planner.explain import explain, spell_split
from yalis.planner.intervals import Interval
from yalis.planner.job import Job
from yalis.planner.machine import Machine
from yalis.planner.search import (
    ANY_SPLIT,
    NO_SLO,
    REPLAYED,
    Candidate,
    Choices,
    Planner,
    Replay,
    Slo,
    best_libraries,
    scaling,
)
from yalis.planner.step import StepTime
from yalis.study import results
from yalis.study.results import Result
from yalis.study.results.kinds.plan import CATEGORIES

_MAX_ROWS = 400  # of a result


@dataclass(frozen=True)
class Search:
    """What `yalis plan` looks for."""

    machine: Machine
    job: Job
    workload: str  # its name
    dtype: str
    nodes: Sequence[int]
    objective: str = "latency"
    choices: Choices = ANY_SPLIT
    slo: Slo = NO_SLO


@dataclass(frozen=True)
class Answer:
    """What it finds. `candidates` has one per split with its best library, the best first."""

    best: Candidate
    candidates: list[Candidate]
    replays: list[Replay]
    curve: dict[Candidate, Interval]  # the best of each scheme on each number of nodes
    why: list[str]


def run_search(search: Search) -> Answer:
    """Estimate all splits, replay the best, and put the replayed ones first in the order of their replayed times."""
    planner = Planner(search.machine, search.job)
    found = planner.candidates(search.nodes, search.choices, search.slo)
    ranked = best_libraries(found, search.objective)
    replays = [planner.replay(one) for one in ranked[:REPLAYED]]
    # Estimate and clock may disagree on which of them meet the objectives.
    replays.sort(key=lambda one: (not search.slo.met(one.ttft, one.itl), one.score(search.objective)))
    first = [one.candidate for one in replays]
    curve = {one: planner.interval(one) for one in scaling(found, search.objective)}
    return Answer(first[0], first + ranked[len(first) :], replays, curve, explain(first[0], found, search.objective))


def make_result(search: Search, answer: Answer, run: str, command: str) -> Result:
    """Return the result; `run` is the command that runs the best split, `command` the one that was typed."""
    job, config = search.job, search.job.config
    shown = answer.candidates[:_MAX_ROWS]
    shown += [one for one in answer.curve if one not in shown]
    parameters = {
        "engine": {
            "model": job.model,
            "max_num_seqs": config.max_num_seqs,
            "max_batch_tokens": config.max_batch_tokens,
        },
        "dtype": search.dtype,
        "machine": search.machine.to_json(),
        "workload": search.workload,
        "objective": search.objective,
        "slo": {name: value for name, value in asdict(search.slo).items() if value is not None},
        "nodes": list(search.nodes),
        "splits": len(answer.candidates),
        "seq_len": job.model_len,
        "why": answer.why,
        "run": run,
    }
    notes = []
    if (moe := job.spec.moe) is not None:
        parameters["assumed"] = {name: one.to_json() for name, one in ASSUMPTIONS.items()}
        split = answer.best.split
        running = min(-(-len(job.requests) // split.replicas), config.max_num_seqs, answer.best.capacity.sequences)
        tokens = -(-running // split.stages)  # a micro-batch
        reached = distinct_experts(moe.num_experts, moe.top_k, tokens)
        notes.append(
            f"Assumed: uniform routing, in which a decode step of {count_of(tokens, 'token')} reaches {reached:.1f} of "
            f"{moe.num_experts} experts of a layer, and the efficiency of the experts' kernels, which is not measured "
            "yet. The intervals contain the bounds of both."
        )
    device = {"type": "cuda" if job.on_gpu else "cpu", "name": search.machine.gpu.name}
    replays = {one.candidate: one for one in answer.replays}
    rows = [_row(one, replays.get(one), answer.curve.get(one)) for one in shown]
    return results.new("plan", parameters, rows, command, [device], notes)


def _row(one: Candidate, replay: Replay | None, interval: Interval | None) -> dict[str, Any]:
    guess, room = one.estimate, one.capacity
    row: dict[str, Any] = results.empty_row("plan")
    row |= {
        "nodes": one.nodes,
        "gpus": one.gpus,
        "scheme": one.scheme,
        "split": spell_split(one.split),
        "rows": one.split.rows,
        "columns": one.split.cols,
        "pp": one.split.stages,
        "dp": one.split.replicas,
        "expert_parallel": one.split.expert_parallel,
        "library": one.library,
        "best_of_scheme": interval is not None,
        "seconds": guess.seconds,
        "ttft_ms": 1e3 * guess.ttft,
        "decode_ms": 1e3 * guess.itl,
        "weight_bytes": room.weights,
        "activation_bytes": room.activations,
        "kv_blocks": room.kv_blocks,
        "sequences": room.sequences,
    }
    if interval is not None:
        row |= {"seconds_low": interval.low, "seconds_high": interval.high}
    time: StepTime = guess.breakdown
    if replay is not None:
        run = replay.simulation
        time = run.breakdown
        row |= {
            "replayed_s": replay.seconds.value,
            "replayed_s_low": replay.seconds.low,
            "replayed_s_high": replay.seconds.high,
            "tokens_per_s": replay.tokens_per_s.value,
            "latency_s": replay.latency,
            "ttft_p90_ms": 1e3 * replay.ttft,
            "itl_p90_ms": 1e3 * replay.itl,
            "steps": run.steps,
            "preemptions": run.preemptions,
        }
    return row | {f"{name}_s": getattr(time, name) for name in CATEGORIES}

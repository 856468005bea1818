"""The settings of a scaling study, and the `yalis bench throughput` command of each.

Every setting leaves its result in a folder of its own. Settings that have a result are not run again, so that an
interrupted study continues, and Slurm jobs may finish in any order.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from yalis.comm.selection import check_backend_name
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.study.requests import ThroughputPlan

FAMILIES = ("tp", "grid", "pp", "hybrid", "dp")
ONE = "one rank"
LOG = "log.txt"  # what a setting's command said, beside its result
ENDED = "ended with exit status"  # what is written there of one that failed without a word


@dataclass(frozen=True)
class Setting:
    split: Split
    allreduce: str = ""  # empty with one rank, which has nobody to sum with

    @property
    def ranks(self) -> int:
        return self.split.size

    @property
    def scheme(self) -> str:
        """Which of the families it belongs to."""
        split = self.split
        if split.size == 1:
            return ONE
        if split.replicas > 1:
            return "dp"
        if split.stages > 1:
            return "hybrid" if split.per_stage > 1 else "pp"
        return "grid" if split.cols > 1 else "tp"

    @property
    def label(self) -> str:
        """ "tp2x2-pp2", the way a scheme is given too."""
        split = self.split
        grid = str(split.rows) if split.cols == 1 else f"{split.rows}x{split.cols}"
        parts = [f"tp{grid}"] if split.per_stage > 1 else []
        parts += [f"{name}{count}" for name, count in (("pp", split.stages), ("dp", split.replicas)) if count > 1]
        return "-".join(parts) or "tp1"

    @property
    def folder(self) -> str:
        return f"{self.label}-{self.allreduce}" if self.allreduce else self.label

    def apply(self, config: EngineConfig) -> EngineConfig:
        split, allreduce = self.split, self.allreduce or config.allreduce
        return replace(config, tp=(split.rows, split.cols), pp=split.stages, dp=split.replicas, allreduce=allreduce)


@dataclass(frozen=True)
class ScalingPlan:
    folder: Path  # of all results
    ranks: tuple[int, ...] = (1, 2, 4)
    schemes: tuple[str, ...] = ("tp", "pp")
    allreduces: tuple[str, ...] = ("auto",)
    node_ranks: int = 4  # ranks that a node holds: where a hybrid goes from tp to pp
    minutes: float = 30.0  # that a setting may take
    work: ThroughputPlan = field(default_factory=ThroughputPlan)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise YalisError("ranks has no number of at least 1; give for example --ranks 1,2,4")
        if not self.schemes or not self.allreduces:
            raise YalisError("there is no scheme or no all-reduce; give for example --schemes tp,pp --allreduce torch")
        if self.node_ranks < 1:
            raise YalisError(f"a node holds {self.node_ranks} ranks; give --tasks-per-node a number of at least 1")
        if not 0 < self.minutes < math.inf:
            raise YalisError(f"minutes is {self.minutes:g}; give a number above 0")
        for name in self.allreduces:
            check_backend_name(name)


def list_settings(plan: ScalingPlan) -> list[Setting]:
    """Every setting once, fewer ranks first."""
    settings: dict[Setting, None] = {}
    unused = set(plan.schemes)
    for ranks in sorted(set(plan.ranks)):
        for scheme in plan.schemes:
            split = _split(scheme, ranks, plan.node_ranks)
            if split is None:
                continue
            unused.discard(scheme)
            for allreduce in plan.allreduces if ranks > 1 else ("",):
                settings.setdefault(Setting(split, allreduce))
    if unused:
        raise YalisError(
            f"scheme {sorted(unused)[0]!r} is none of {', '.join(map(str, plan.ranks))} ranks; give more --ranks, or "
            "leave it out"
        )
    return list(settings)


def _split(scheme: str, ranks: int, node_ranks: int) -> Split | None:
    """What a scheme means for so many ranks; None where it means nothing."""
    if scheme not in FAMILIES:
        split = _read_split(scheme)
        return split if split.size == ranks else None
    if ranks == 1:
        return Split()
    if scheme == "tp":
        return Split(rows=ranks)
    if scheme == "pp":
        return Split(stages=ranks)
    if scheme == "dp":
        return Split(replicas=ranks)
    if scheme == "hybrid":  # tp inside a node and pp between nodes; two stages on one node
        per_stage = node_ranks if node_ranks < ranks else ranks // 2
        return Split(rows=per_stage, stages=ranks // per_stage) if per_stage > 1 and ranks % per_stage == 0 else None
    cols = max(col for col in range(1, math.isqrt(ranks) + 1) if ranks % col == 0)  # the squarest grid
    return Split(ranks // cols, cols) if cols > 1 else None


def _read_split(scheme: str) -> Split:
    """ "2x2", "tp4", "tp2-pp2"."""
    counts: dict[str, int] = {}
    for part in scheme.lower().split("-"):
        found = re.fullmatch(r"(?:tp)?([1-9]\d*)x([1-9]\d*)|(tp|pp|dp)([1-9]\d*)", part)
        if found is None or counts.keys() & (new := _degrees(found)).keys():
            raise YalisError(
                f"scheme {scheme!r} is not known; accepted: {', '.join(FAMILIES)}, or one split such as 2x2, tp4 or "
                "tp2-pp2"
            )
        counts |= new
    return Split(**counts)


def _degrees(found: re.Match[str]) -> dict[str, int]:
    rows, cols, name, count = found.groups()
    if name is None:
        return {"rows": int(rows), "cols": int(cols)}
    return {{"tp": "rows", "pp": "stages", "dp": "replicas"}[name]: int(count)}


def command_line(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> str:
    """The setting's command, wherever it is started from: the first line of its log."""
    return shlex.join(["yalis", *command_words(config, replace(plan, folder=plan.folder.resolve()), setting)])


def command_words(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> list[str]:
    """`yalis` with these words measures the setting and leaves its result in its folder."""
    work = plan.work
    words = ["bench", "throughput"]
    for one in work.workloads:
        words += ["--workload", str(one)]
    words += _flags(work, without=("workloads", "peer"))
    words += _flags(setting.apply(config))
    if config.prefix_reuse:  # which is off in throughput unless asked for
        words.append("--prefix-reuse")
    return [*words, "--out", str(plan.folder / setting.folder)]


def _flags(values: Any, without: tuple[str, ...] = ()) -> list[str]:
    """The fields of a dataclass that are not at their default, as flags."""
    words: list[str] = []
    for one in fields(values):
        value, flag = getattr(values, one.name), one.name.replace("_", "-")
        if one.name in without or value == one.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", "x".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words

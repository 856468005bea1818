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
from yalis.study.results.kinds.scaling import ONE_RANK

SCHEMES = ("tp", "grid", "pp", "hybrid", "dp")
LOG = "log.txt"  # the output of a setting's command, next to its result
EXITED = "exited with status"  # last line of the log if the command failed


@dataclass(frozen=True)
class Setting:
    """One point of the study: how the model is split, and the all-reduce."""

    split: Split
    allreduce: str = ""  # empty with one rank

    @property
    def ranks(self) -> int:
        return self.split.size

    @property
    def scheme(self) -> str:
        """The scheme of SCHEMES that this split belongs to."""
        split = self.split
        if split.size == 1:
            return ONE_RANK
        if split.replicas > 1:
            return "dp"
        if split.stages > 1:
            return "hybrid" if split.per_stage > 1 else "pp"
        return "grid" if split.cols > 1 else "tp"

    @property
    def label(self) -> str:
        """The split as --schemes accepts it, such as "tp2x2-pp2"."""
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
    """What `yalis bench scaling` runs. The fields but the first and last are written to the result."""

    folder: Path  # with one folder per setting
    ranks: tuple[int, ...] = (1, 2, 4)
    schemes: tuple[str, ...] = ("tp", "pp")
    allreduces: tuple[str, ...] = ("auto",)
    node_ranks: int = 4  # ranks per node: the tensor-parallel size of hybrid
    minutes: float = 30.0  # time limit of a setting
    throughput: ThroughputPlan = field(default_factory=ThroughputPlan)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise YalisError("--ranks needs numbers of at least 1; give for example --ranks 1,2,4")
        if not self.schemes or not self.allreduces:
            raise YalisError("--schemes or --allreduce is empty; give for example --schemes tp,pp --allreduce torch")
        if self.node_ranks < 1:
            raise YalisError(f"--tasks-per-node is {self.node_ranks}; give a whole number of at least 1")
        if not 0 < self.minutes < math.inf:
            raise YalisError(f"minutes is {self.minutes:g}; give a number above 0")
        for name in self.allreduces:
            check_backend_name(name)


def list_settings(plan: ScalingPlan) -> list[Setting]:
    """Return every setting once, in order of ranks."""
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
            f"scheme {sorted(unused)[0]!r} fits none of {', '.join(map(str, plan.ranks))} ranks; give other --ranks, "
            "or omit it"
        )
    return list(settings)


def _split(scheme: str, ranks: int, node_ranks: int) -> Split | None:
    """Return the split of a scheme over `ranks`, or None if there is none."""
    if scheme not in SCHEMES:
        split = _parse_split(scheme)
        return split if split.size == ranks else None
    if ranks == 1:
        return Split()
    if scheme == "tp":
        return Split(rows=ranks)
    if scheme == "pp":
        return Split(stages=ranks)
    if scheme == "dp":
        return Split(replicas=ranks)
    if scheme == "hybrid":  # intra-node tp and inter-node pp; two stages on a single node
        per_stage = node_ranks if node_ranks < ranks else ranks // 2
        return Split(rows=per_stage, stages=ranks // per_stage) if per_stage > 1 and ranks % per_stage == 0 else None
    cols = max(col for col in range(1, math.isqrt(ranks) + 1) if ranks % col == 0)  # as square as possible
    return Split(ranks // cols, cols) if cols > 1 else None


def _parse_split(scheme: str) -> Split:
    """Parse one split, such as "2x2", "tp4" or "tp2-pp2"."""
    counts: dict[str, Any] = {}
    for part in scheme.lower().split("-"):
        match = re.fullmatch(r"(?:tp)?([1-9]\d*)x([1-9]\d*)|(tp|pp|dp)([1-9]\d*)", part)
        if match is None or counts.keys() & (new := _degrees(match)).keys():
            raise YalisError(
                f"unknown scheme {scheme!r}; accepted: {', '.join(SCHEMES)}, or one split such as 2x2, tp4 or tp2-pp2"
            )
        counts |= new
    return Split(**counts)


def _degrees(match: re.Match[str]) -> dict[str, int]:
    rows, cols, name, count = match.groups()
    if name is None:
        return {"rows": int(rows), "cols": int(cols)}
    return {{"tp": "rows", "pp": "stages", "dp": "replicas"}[name]: int(count)}


def command_line(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> str:
    """Return the command of a setting, which is the first line of its log, with absolute paths."""
    return shlex.join(["yalis", *command_args(config, replace(plan, folder=plan.folder.resolve()), setting)])


def command_args(config: EngineConfig, plan: ScalingPlan, setting: Setting) -> list[str]:
    """Return the arguments of `yalis` that measure a setting and write the result to its folder."""
    throughput = plan.throughput
    args = ["bench", "throughput"]
    for workload in throughput.workloads:
        args += ["--workload", str(workload)]
    args += _flags(throughput, without=("workloads", "peer"))
    args += _flags(setting.apply(config))
    if config.prefix_reuse:  # off in bench throughput by default
        args.append("--prefix-reuse")
    return [*args, "--out", str(plan.folder / setting.folder)]


def _flags(values: Any, without: tuple[str, ...] = ()) -> list[str]:
    """Return the fields of a dataclass that differ from their defaults as flags."""
    args: list[str] = []
    for one in fields(values):
        value, flag = getattr(values, one.name), one.name.replace("_", "-")
        if one.name in without or value == one.default:
            continue
        if isinstance(value, bool):
            args.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            args += [f"--{flag}", "x".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return args

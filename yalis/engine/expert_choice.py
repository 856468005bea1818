"""Chooses how a mixture of experts is split over the rows of a grid, if the configuration leaves it open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, resolve_dtype
from yalis.errors import YalisError, count_of
from yalis.parallel.plan import Split
from yalis.perfmodel.expert_split import CPU_COSTS, GPU_COSTS, cost_per_token
from yalis.spec import ModelSpec

#: Share by which whole experts must be cheaper. The model takes routing as uniform, and real routing is less even.
_MARGIN = 0.05


@dataclass(frozen=True)
class ExpertChoice:
    """A split with `expert_parallel` decided, and why; the reason is empty if there was nothing to decide."""

    split: Split
    reason: str = ""


def split_of(config: EngineConfig) -> Split:
    """Return the split that `config` asks for, with slices of every expert if it leaves that open."""
    return Split(*config.tp, config.pp, config.dp, bool(config.expert_parallel))


def list_splits(config: EngineConfig, spec: ModelSpec, label: str) -> list[Split]:
    """Return the possible splits, first that with slices of every expert; raises YalisError if there is none."""
    split = split_of(config)
    if config.expert_parallel is None and spec.moe is not None and split.rows > 1:
        both = (split, replace(split, expert_parallel=True))
        if possible := [one for one in both if _is_possible(one, spec)]:
            return possible
    split.check(spec, label)
    return [replace(split, expert_parallel=split.expert_parallel and split.rows > 1)]


def choose_experts(config: EngineConfig, spec: ModelSpec, label: str, itemsize: int, on_gpu: bool) -> ExpertChoice:
    """Return the split with the lower modelled cost. `itemsize`: bytes of a weight."""
    first, *others = list_splits(config, spec, label)
    moe = spec.moe
    if moe is None or config.expert_parallel is not None or first.rows == 1:
        return ExpertChoice(first)
    if not others:
        rows = f"{first.rows} rows"
        if first.expert_parallel:
            return ExpertChoice(first, f"whole experts on each rank: {rows} cannot have slices of every expert")
        return ExpertChoice(first, f"a slice of every expert on each rank: {rows} for {moe.num_experts} experts")
    if first.cols > 1:
        reason = (
            "a slice of every expert on each rank: with whole experts the all-reduce over columns, between the "
            f"products of an expert, has {first.rows} times the bytes"
        )
        return ExpertChoice(first, reason)
    steps = (config.max_num_seqs, config.max_batch_tokens)
    slices, whole = (
        cost_per_token(
            moe, spec.hidden_size, first.rows, one, itemsize, steps, GPU_COSTS if on_gpu else CPU_COSTS
        )
        for one in (False, True)
    )  # fmt: skip
    work = f"of {count_of(steps[0], 'sequence')} and of {count_of(steps[1], 'prompt token')}"
    if whole < slices * (1 - _MARGIN):
        reason = f"whole experts on each rank: modelled {1 - whole / slices:.0%} cheaper in steps {work}"
        return ExpertChoice(others[0], reason)
    margin = f"less than {_MARGIN:.0%} cheaper" if whole < slices else f"{whole / slices - 1:.0%} more expensive"
    return ExpertChoice(
        first, f"a slice of every expert on each rank: whole experts are modelled {margin} in steps {work}"
    )


def resolve_experts(config: EngineConfig, spec: ModelSpec, label: str) -> EngineConfig:
    """Return the configuration with the choice for a mixture of experts made, to be stored with results."""
    if config.expert_parallel is not None or spec.moe is None:
        return config
    device = resolve_device(config.device)
    itemsize = resolve_dtype(config.dtype, spec.dtype, device).itemsize
    choice = choose_experts(config, spec, label, itemsize, device.type == "cuda")
    return replace(config, expert_parallel=choice.split.expert_parallel)


def _is_possible(split: Split, spec: ModelSpec) -> bool:
    try:
        split.check(spec, "")
    except YalisError:
        return False
    return True

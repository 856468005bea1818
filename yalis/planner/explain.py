"""Says in a sentence why one split is faster than others, from where their time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from yalis.parallel.plan import Split
from yalis.planner.search import Candidate
from yalis.planner.step import StepTime

#: A difference below this share of the job's time is not mentioned.
_NOTABLE = 0.02


def spell_split(split: Split) -> str:
    """Return a text such as "tp 4x2, pp 2" or "one GPU". "tp 4 ep" has whole experts on each row of its grid."""
    grid = f"tp {split.rows}" if split.cols == 1 else f"tp {split.rows}x{split.cols}"
    parts = [f"{grid} ep" if split.expert_parallel else grid] * (split.per_stage > 1)
    parts += [f"pp {split.stages}"] * (split.stages > 1) + [f"dp {split.replicas}"] * (split.replicas > 1)
    return ", ".join(parts) or "one GPU"


def explain(best: Candidate, candidates: Sequence[Candidate], objective: str, limit: int = 3) -> list[str]:
    """Return sentences that compare the best candidate with the best of other kinds on as many nodes.

    Compared are the other libraries with the same split, then the other schemes, then other numbers of nodes.
    """
    ranked = sorted(candidates, key=lambda one: one.score(objective))
    same_split = [one for one in ranked if (one.nodes, one.split) == (best.nodes, best.split)]
    others = {one.library: one for one in reversed(same_split) if one.library != best.library}
    compared = sorted(others.values(), key=lambda one: one.score(objective))[:1]
    schemes: dict[str, Candidate] = {}
    for one in ranked:
        if one.nodes == best.nodes and one.scheme != best.scheme:
            schemes.setdefault(one.scheme, one)
    compared += list(schemes.values())[: limit - len(compared)]
    elsewhere = next((one for one in ranked if one.nodes != best.nodes), None)
    if elsewhere is not None:
        compared.append(elsewhere)
    return [_compare(best, other, objective) for other in compared]


def _compare(best: Candidate, other: Candidate, objective: str) -> str:
    ratio = other.score(objective) / best.score(objective)
    name = spell_split(other.split)
    if other.split == best.split and other.nodes == best.nodes:
        name = f"the same with {other.library}"
    elif other.nodes != best.nodes:
        name = f"{name} on {other.nodes} nodes" if other.nodes > 1 else f"{name} on 1 node"
    saved = _differences(best.estimate.breakdown, other.estimate.breakdown)
    word = {"latency": "faster", "throughput": "faster", "cost": "cheaper"}[objective]
    return f"{ratio:.2f}x {word} than {name}: {saved}"


def _differences(best: StepTime, other: StepTime) -> str:
    """Return the two largest differences between the categories, such as "communication 41% less (3.2 s)"."""
    deltas = {one.name: getattr(best, one.name) - getattr(other, one.name) for one in fields(best)}
    largest = sorted(deltas, key=lambda name: -abs(deltas[name]))[:2]
    texts = []
    for name in largest:
        delta, before = deltas[name], getattr(other, name)
        if abs(delta) < _NOTABLE * max(best.total, 1e-12):
            continue
        share = f"{abs(delta) / before:.0%} " if before else ""
        texts.append(f"{name} {share}{'less' if delta < 0 else 'more'} ({abs(delta):.3g} s)")
    return ", ".join(texts) or "small differences everywhere"

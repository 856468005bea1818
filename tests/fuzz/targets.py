"""All fuzz targets."""

from __future__ import annotations

from random import Random

from tests.fuzz.configs import ConfigTarget
from tests.fuzz.gguf import GgufTarget
from tests.fuzz.hello import ImpostorTarget, RankTarget, StrangerTarget
from tests.fuzz.safetensors import IndexTarget, SafetensorsTarget
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        StrangerTarget(),
        RankTarget(),
        ImpostorTarget(),
        ConfigTarget(),
        GgufTarget(),
        SafetensorsTarget(),
        IndexTarget(),
    )
}


def make_input(target: str, seed: int, index: int) -> bytes:
    """Return input `index` of a target; the same bytes at every call."""
    return TARGETS[target].make(Random(f"{seed} {target} {index}"))

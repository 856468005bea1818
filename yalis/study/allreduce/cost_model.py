"""The cost model of an all-reduce result: what its algorithms should take on the links that were measured with it.

All of them use the same links: gloo's on CPUs, nvrar's symmetric memory on GPUs. Libraries with costs of their own,
such as NCCL, are modelled in planner/communication.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from yalis.perfmodel.collectives import (
    INTER_NODE,
    Algorithm,
    Cost,
    Link,
    Shape,
    gloo_ring,
    hierarchical,
    one_shot,
    ring,
)
from yalis.study.results.result import Result

#: Bytes sent per byte of data by the LL protocol, which sends 4 bytes of data with a 4-byte flag.
LL_FACTOR = 2.0


@dataclass(frozen=True)
class CostModel:
    shape: Shape
    intra: Link
    inter: Link
    fixed_seconds: float | None  # launch and completion of a kernel, on GPUs; None on CPUs

    @classmethod
    def of(cls, result: Result, delay_us: float | None) -> CostModel | None:
        """Return the model for the links with this delay; None if they were not measured or nodes are uneven."""
        facts = result.parameters
        counts = {len(ranks) for ranks in facts["nodes"]}
        found = [link for link in facts["links"] if link["delay_us"] == delay_us]
        if not found or len(counts) > 1:
            return None
        unused = {"latency": 0, "seconds_per_byte": 0}
        intra, inter = (Link(**found[0].get(name, unused)) for name in ("inside", "between"))
        shared = bool(facts.get("lab", {}).get("rate"))
        shape = Shape(len(facts["nodes"]), counts.pop(), shared_link=shared)
        return cls(shape, intra, inter, found[0].get("fixed"))

    def expected_us(self, size: int) -> dict[str, float]:
        """Return the microseconds each algorithm should take for a message of `size` bytes."""
        if self.fixed_seconds is not None:
            return {
                name: 1e6 * (self.fixed_seconds + algorithm(self.shape, size).seconds(self.intra, self.inter))
                for name, algorithm in self._gpu_algorithms.items()
            }
        best = min(hierarchical(self.shape, size, name).seconds(self.intra, self.inter) for name in INTER_NODE)
        gloo = gloo_ring(self.shape, size).seconds(self.intra, self.inter)
        return {"hierarchical": 1e6 * best, "gloo": 1e6 * gloo}

    @property
    def _gpu_algorithms(self) -> dict[str, Algorithm]:
        """The algorithms on nvrar's symmetric memory, which all use the LL protocol."""

        def flat_ring(shape: Shape, bytes: float) -> Cost:
            flat = Shape(shape.size, 1) if shape.nodes > 1 else shape  # one ring over all ranks, regardless of nodes
            return ring(flat, LL_FACTOR * bytes)

        return {
            "nvrar": lambda shape, bytes: hierarchical(shape, bytes, wire_factor=LL_FACTOR),
            "ring": flat_ring,
            "oneshot": lambda shape, bytes: one_shot(shape, LL_FACTOR * bytes),
        }

"""What was measured of all-reduces: for each shape of a group and message size, how long each way of doing it took.

`yalis bench allreduce --tune` writes one file for a kind of device and a shape into the cache; rank 0 reads them and
tells all ranks, since ranks that choose differently wait for each other for ever.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from yalis import env
from yalis.errors import YalisError, YalisFailure
from yalis.launch.world import World

SCHEMA = "yalis-tuning"
VERSION = 1


@dataclass(frozen=True)
class Choice:
    """A way of doing an all-reduce."""

    backend: str
    options: Mapping[str, int | str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True)
class Timing:
    bytes: int
    choice: Choice
    microseconds: float


@dataclass(frozen=True)
class ShapeTimings:
    """The timings of one shape."""

    timings: tuple[Timing, ...] = ()

    def best(self, bytes: int, among: str | Collection[str]) -> Choice | None:
        """The fastest of these backends at the measured size nearest to `bytes`; None where none was measured."""
        wanted = (among,) if isinstance(among, str) else among
        found = [timing for timing in self.timings if timing.choice.backend in wanted]
        if not found:
            return None
        size = min({timing.bytes for timing in found}, key=lambda size: (abs(math.log2(max(bytes, 1) / size)), size))
        return min((timing for timing in found if timing.bytes == size), key=lambda timing: timing.microseconds).choice

    @property
    def backends(self) -> set[str]:
        """Those that are the fastest somewhere."""
        names = {timing.choice.backend for timing in self.timings}
        sizes = {timing.bytes for timing in self.timings}
        return {best.backend for size in sizes if (best := self.best(size, names))}


@dataclass(frozen=True)
class TuningTable:
    """What is known of every shape, on one kind of device."""

    shapes: Mapping[str, ShapeTimings] = field(default_factory=dict)

    def for_nodes(self, nodes: Sequence[Sequence[int]]) -> ShapeTimings:
        """The timings for a group whose ranks are spread like these: `Topology.by_node(ranks)`."""
        return self.shapes.get(shape_of(nodes), ShapeTimings())


def shape_of(nodes: Sequence[Sequence[int]]) -> str:
    """ "4x2": four nodes of two ranks; "2+1" where nodes differ."""
    counts = [len(ranks) for ranks in nodes]
    return f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))


def device_slug(device: torch.device) -> str:
    """ "cpu", or the GPU's name as part of a file name."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def folder() -> Path:
    return env.cache_dir() / "tuning"


def save(device: torch.device, nodes: Sequence[Sequence[int]], timings: Sequence[Timing], command: str) -> Path:
    """Keep these for later jobs; what was known of this device and shape before is replaced."""
    path = folder() / f"{device_slug(device)}-{shape_of(nodes)}.json"
    held = {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "device": device_slug(device),
        "shape": shape_of(nodes),
        "command": command,
        "timings": [asdict(timing) for timing in timings],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(held, indent=1, allow_nan=False) + "\n")
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise YalisFailure(f"cannot write {path}: {error.strerror}; set YALIS_CACHE to a folder that can be") from error
    return path


def load(device: torch.device) -> TuningTable:
    """Every shape that was measured on this kind of device."""
    shapes = {}
    kind = device_slug(device)
    for path in sorted(folder().glob(f"{kind}-*.json")):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if (held["schema"], held["schema_version"], held["device"]) != (SCHEMA, VERSION, kind):
                continue
            shapes[held["shape"]] = _tuned(held["timings"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise YalisError(
                f"{path} is not a table of `yalis bench allreduce --tune` ({error}); remove it, or tune again"
            ) from error
    return TuningTable(shapes)


def load_on_all_ranks(world: World, device: torch.device) -> TuningTable:
    """Rank 0's table, on every rank; every rank calls this."""
    own: dict[str, Any] = {}
    if world.rank == 0:
        own = {shape: [asdict(timing) for timing in tuned.timings] for shape, tuned in load(device).shapes.items()}
    told = world.all_gather_object(own)[0]
    return TuningTable({shape: _tuned(timings) for shape, timings in told.items()})


def _tuned(held: Sequence[Mapping[str, Any]]) -> ShapeTimings:
    timings = tuple(
        Timing(int(one["bytes"]), Choice(one["choice"]["backend"], dict(one["choice"]["options"])), one["microseconds"])
        for one in held
    )
    if any(timing.bytes < 1 or not timing.microseconds > 0 for timing in timings):
        raise ValueError("a timing without bytes or time")
    return ShapeTimings(timings)

"""Measured all-reduce times by group shape, message size, backend and options.

`yalis bench allreduce --tune` writes one file per device type and group shape into the cache. Rank 0 reads the files
and broadcasts them, because ranks that choose different algorithms deadlock.
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

from yalis.cache_folders import SET_CACHE, cache_folder, persistent_cache_folder
from yalis.errors import YalisError, YalisFailure
from yalis.launch.world import World

SCHEMA = "yalis-tuning"
VERSION = 1


@dataclass(frozen=True)
class Choice:
    """A backend and its options."""

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
    """The measurements of one group shape."""

    timings: tuple[Timing, ...] = ()

    def best(self, bytes: int, among: str | Collection[str]) -> Choice | None:
        """Return the fastest choice of these backends at the measured size nearest to `bytes`, None if unmeasured."""
        backends = (among,) if isinstance(among, str) else among
        found = [timing for timing in self.timings if timing.choice.backend in backends]
        if not found:
            return None
        size = min({timing.bytes for timing in found}, key=lambda size: (abs(math.log2(max(bytes, 1) / size)), size))
        return min((timing for timing in found if timing.bytes == size), key=lambda timing: timing.microseconds).choice

    @property
    def backends(self) -> set[str]:
        """The backends that are fastest at some size."""
        names = {timing.choice.backend for timing in self.timings}
        sizes = {timing.bytes for timing in self.timings}
        return {best.backend for size in sizes if (best := self.best(size, names))}


@dataclass(frozen=True)
class TuningTable:
    """The measurements of every group shape, on one device type."""

    shapes: Mapping[str, ShapeTimings] = field(default_factory=dict)

    def for_nodes(self, nodes: Sequence[Sequence[int]]) -> ShapeTimings:
        """Return the measurements for a group with these ranks per node (`Topology.by_node(ranks)`)."""
        return self.shapes.get(shape_of(nodes), ShapeTimings())


def shape_of(nodes: Sequence[Sequence[int]]) -> str:
    """Return "4x2" for four nodes of two ranks, "2+1" for nodes of different sizes."""
    counts = [len(ranks) for ranks in nodes]
    return f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))


def device_slug(device: torch.device) -> str:
    """Return "cpu", or the GPU's name in a form usable in file names."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def save(device: torch.device, nodes: Sequence[Sequence[int]], timings: Sequence[Timing], command: str) -> Path:
    """Write the measurements of a device type and shape to the cache, replacing older ones. Returns the file's path."""
    name = f"{device_slug(device)}-{shape_of(nodes)}.json"
    contents = {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "device": device_slug(device),
        "shape": shape_of(nodes),
        "command": command,
        "timings": [asdict(timing) for timing in timings],
    }
    try:
        path = persistent_cache_folder("tuning") / name
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(contents, indent=1, allow_nan=False) + "\n")
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise YalisFailure(f"cannot write {name}: {error.strerror}; {SET_CACHE}") from error
    return path


def load(device: torch.device) -> TuningTable:
    """Load the measurements of all shapes for this device type."""
    shapes = {}
    slug = device_slug(device)
    for path in sorted(cache_folder("tuning").glob(f"{slug}-*.json")):
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
            if (contents["schema"], contents["schema_version"], contents["device"]) != (SCHEMA, VERSION, slug):
                continue
            shapes[contents["shape"]] = _parse_timings(contents["timings"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise YalisError(
                f"{path} is not a table of `yalis bench allreduce --tune` ({error}); remove it, or tune again"
            ) from error
    return TuningTable(shapes)


def load_on_all_ranks(world: World, device: torch.device) -> TuningTable:
    """Load the table on rank 0 and return it on every rank. Every rank calls this."""
    loaded: dict[str, Any] = {}
    if world.rank == 0:
        loaded = {shape: [asdict(timing) for timing in held.timings] for shape, held in load(device).shapes.items()}
    received = world.broadcast_object(loaded)
    return TuningTable({shape: _parse_timings(timings) for shape, timings in received.items()})


def _parse_timings(entries: Sequence[Mapping[str, Any]]) -> ShapeTimings:
    timings = tuple(
        Timing(
            int(entry["bytes"]),
            Choice(entry["choice"]["backend"], _rename_options(entry["choice"]["options"])),
            entry["microseconds"],
        )
        for entry in entries
    )
    if any(timing.bytes < 1 or not timing.microseconds > 0 for timing in timings):
        raise ValueError("a timing without bytes or time")
    return ShapeTimings(timings)


def _rename_options(options: Mapping[str, int | str]) -> dict[str, int | str]:
    """Translate option names of older tables: the inter-node algorithm was called `between`."""
    return {"inter" if name == "between" else name: value for name, value in options.items()}

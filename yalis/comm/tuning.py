"""Measured all-reduce times by group shape, message size, backend and options.

`yalis bench allreduce --tune` writes one file per group shape and `TableKey` into the cache: times are only used where
they were measured, not, for example, those of ranks that share a GPU on a cluster. Rank 0 reads the files and
broadcasts them, because ranks that choose different algorithms deadlock.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from yalis.cache_folders import SET_CACHE, cache_folder, persistent_cache_folder
from yalis.comm.nvrar.transport import gather_transports
from yalis.errors import YalisError, YalisFailure
from yalis.launch.world import World
from yalis.log import get_logger

log = get_logger(__name__)

SCHEMA = "yalis-tuning"
#: Files of version 1 have only the device and the shape.
VERSION = 2
ONE_HOST, TCP = "one-host", "tcp"  # transports of CPU ranks


@dataclass(frozen=True)
class TableKey:
    """Where times were measured, besides the shape of the group. They are used where everything is equal."""

    device: str  # "cpu", or the GPU's name in a form usable in file names
    transport: str  # name of a Transport; on CPUs "one-host" or "tcp"
    nic: str = ""
    nvshmem: str = ""
    nccl: str = ""
    ranks_per_gpu: int = 1

    def difference(self, other: TableKey) -> str:
        """Return the first difference as a phrase such as "over ibrc, not shared-gpu"; empty if there is none."""
        for name, phrase in _DIFFERENCES.items():
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                return f"{phrase.format(one or 'none')}, not {two or 'none'}"
        return ""


_DIFFERENCES = {
    "device": "on {}",
    "transport": "over {}",
    "ranks_per_gpu": "with ranks per GPU: {}",
    "nic": "with the NICs {}",
    "nvshmem": "with NVSHMEM {}",
    "nccl": "with NCCL {}",
}


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
    #: by shape: why a file is not used although there is no other of that shape
    refused: dict[str, str] = field(default_factory=dict)

    def for_nodes(self, nodes: Sequence[Sequence[int]]) -> ShapeTimings:
        """Return the measurements for a group with these ranks per node (`Topology.by_node(ranks)`).

        If there are only some that were measured elsewhere, logs a notice, once."""
        shape = shape_of(nodes)
        if (reason := self.refused.pop(shape, None)) is not None:
            log.warning("%s; run `yalis bench allreduce --tune` here for fast all-reduces", reason)
        return self.shapes.get(shape, ShapeTimings())


def shape_of(nodes: Sequence[Sequence[int]]) -> str:
    """Return "4x2" for four nodes of two ranks, "2+1" for nodes of different sizes."""
    counts = [len(ranks) for ranks in nodes]
    return f"{len(counts)}x{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))


def device_slug(device: torch.device) -> str:
    """Return "cpu", or the GPU's name in a form usable in file names."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def find_key(world: World, device: torch.device) -> TableKey:
    """Return the key of tables for this job. Every rank calls this, and gets the same."""
    hosts = len({member.node for member in world.members})
    if device.type != "cuda":
        return TableKey(device.type, ONE_HOST if hosts == 1 else TCP)
    transports = gather_transports(world, str(torch.cuda.get_device_properties(device).uuid))
    first = transports[0]
    names = "+".join(sorted({transport.name for transport in transports}))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    own = TableKey(device_slug(device), names, first.nic, first.nvshmem, nccl, first.ranks_per_gpu)
    return TableKey(**world.broadcast_object(asdict(own)))


def save(key: TableKey, nodes: Sequence[Sequence[int]], timings: Sequence[Timing], command: str) -> Path:
    """Write the measurements of a key and shape to the cache, replacing older ones. Returns the file's path."""
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=4).hexdigest()
    where = "" if (key.device, key.transport) == ("cpu", ONE_HOST) else f"-{key.transport}-{digest}"
    name = f"{key.device}-{shape_of(nodes)}{where}.json"
    contents = {
        "schema": SCHEMA,
        "schema_version": VERSION,
        **asdict(key),
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


def load(key: TableKey) -> TuningTable:
    """Load the measurements of all shapes that were made under this key."""
    shapes: dict[str, ShapeTimings] = {}
    refused: dict[str, str] = {}
    for path in sorted(cache_folder("tuning").glob(f"{key.device}-*.json")):
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
            version = contents["schema_version"]
            if contents["schema"] != SCHEMA or version not in (1, VERSION) or contents["device"] != key.device:
                continue
            shape, timings = contents["shape"], _parse_timings(contents["timings"])
            if reason := _why_refused(contents, key):
                refused[shape] = f"{path} is not used: it was measured {reason}"
            else:
                shapes[shape] = timings
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise YalisError(
                f"{path} is not a table of `yalis bench allreduce --tune` ({error}); remove it, or tune again"
            ) from error
    return TuningTable(shapes, {shape: reason for shape, reason in refused.items() if shape not in shapes})


def _why_refused(contents: Mapping[str, Any], key: TableKey) -> str:
    """Return where a file was measured that is not here, as a phrase; empty if it can be used."""
    if contents["schema_version"] == VERSION:
        return TableKey(**{part.name: contents[part.name] for part in fields(TableKey)}).difference(key)
    # The device and the shape are the whole key of CPU ranks on one host.
    complete = (key.device, key.transport) == ("cpu", ONE_HOST)
    return "" if complete else "by an older version, which did not record the transport"


def load_on_all_ranks(world: World, device: torch.device) -> TuningTable:
    """Load the table on rank 0 and return it on every rank. Every rank calls this.

    Only rank 0 has the notices about files that are not used."""
    key = find_key(world, device)
    loaded = load(key) if world.rank == 0 else TuningTable()
    shapes = {shape: [asdict(timing) for timing in held.timings] for shape, held in loaded.shapes.items()}
    received = world.broadcast_object(shapes)
    return TuningTable({shape: _parse_timings(timings) for shape, timings in received.items()}, loaded.refused)


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

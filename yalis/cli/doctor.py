"""What is installed and usable here, and the reason where something is not."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from yalis import __version__, env
from yalis.cli.flags import add_common_flags

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16", "float16")
_NEEDED = ("torch", "numpy", "transformers")
_OPTIONAL = {
    "gguf": "only GGUF files need it",
    "jinja2": "only chat templates need it",
    "accelerate": "only `yalis bench --peer transformers` of a GGUF file needs it",
    "triton": "only the triton attention backend needs it",
    "mpi4py": "only --allreduce mpi needs it",
    "matplotlib": "only plots need it",
}


@dataclass(frozen=True)
class Finding:
    area: str
    name: str
    usable: bool
    detail: str
    needed: bool = False  # nothing runs without it


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_common_flags(parser, json="print one object per line")


def run(args: argparse.Namespace) -> int:
    broken = False
    area = ""
    for finding in examine():
        broken |= finding.needed and not finding.usable
        if args.json:
            print(json.dumps(asdict(finding)), flush=True)
            continue
        if finding.area != area:
            area = finding.area
            print(area)
        print(f"  {'ok' if finding.usable else '--'}  {finding.name:<14}{finding.detail}", flush=True)
    return 1 if broken else 0


def examine() -> Iterator[Finding]:
    yield Finding("software", "yalis", True, __version__, needed=True)
    yield Finding("software", "python", True, platform.python_version(), needed=True)
    yield from _packages()
    yield _cache()
    try:
        import torch
    except (ImportError, OSError):  # a broken install fails while loading its libraries
        return
    yield _native()
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        yield _device(device)
    if len(devices) == 1:
        yield Finding("devices", "cuda", False, "torch sees no GPU")
    for device in devices[:2]:  # GPUs of one machine are alike
        yield from _attention(device)
    yield _launcher()
    yield _lab()
    for device in devices[:2]:
        yield from _communication(device)


def _packages() -> Iterator[Finding]:
    from yalis.results import package_version

    for name in (*_NEEDED, *_OPTIONAL):
        version = package_version(name)
        if name == "torch":
            yield _torch(version)
        elif version is not None:
            yield Finding("software", name, True, version, needed=name in _NEEDED)
        else:
            use = "" if name in _NEEDED else f"{_OPTIONAL[name]}: "
            yield Finding("software", name, False, f"not installed; {use}pip install {name}", needed=name in _NEEDED)


def _torch(version: str | None) -> Finding:
    if version is None:
        return Finding("software", "torch", False, "not installed; pip install torch", needed=True)
    try:
        import torch

        from yalis.engine.device import OLDEST_TORCH, torch_is_old
    except (ImportError, OSError) as error:
        return Finding("software", "torch", False, f"{version} does not load: {error}", needed=True)
    if torch_is_old():
        oldest = ".".join(map(str, OLDEST_TORCH))
        detail = f"{torch.__version__} is too old; {oldest} or newer is needed: pip install -U torch"
        return Finding("software", "torch", False, detail, needed=True)
    return Finding("software", "torch", True, torch.__version__, needed=True)


def _cache() -> Finding:
    """A folder that is not there yet counts by the nearest one above it."""
    folder = env.cache_dir()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return Finding("software", "cache", True, f"{folder}{'' if there == folder else ' (not made yet)'}")
    except OSError:
        return Finding("software", "cache", False, f"{folder} cannot be written; set YALIS_CACHE to a folder that can")


def _native() -> Finding:
    from yalis.kernels import native

    library = native.load()
    if library is not None:
        return Finding("software", "native", True, f"CPU kernels built for this machine: {library.path}")
    return Finding("software", "native", False, f"no CPU kernels, plain torch decodes instead: {native.reason()}")


def _device(device: torch.device) -> Finding:
    import torch

    from yalis.study.bandwidth import describe_device

    facts = describe_device(device)
    detail = facts["name"]
    if device.type == "cuda":
        detail += f", {facts['memory_gib']} GiB, capability {facts['capability']}, CUDA {facts['cuda']}"
    else:
        detail += f", {facts['threads']} threads"
    computes = []
    for name in _DTYPES:
        try:
            square = torch.ones(8, 8, device=device, dtype=getattr(torch, name))
            computes += [name] if (square @ square)[0, 0].item() == 8 else []
        except RuntimeError:
            continue
    return Finding("devices", str(device), bool(computes), f"{detail}; computes in {', '.join(computes) or 'nothing'}")


def _launcher() -> Finding:
    from yalis.errors import YalisError
    from yalis.launch.launchers import detect_launcher

    try:
        info = detect_launcher()
    except YalisError as error:
        return Finding("ranks", "launcher", False, str(error))
    if not info.launcher:
        return Finding("ranks", "launcher", True, "none: yalis starts the ranks for --tp, --pp and --dp itself")
    return Finding("ranks", "launcher", True, f"{info.launcher}, this is rank {info.rank} of {info.size}")


def _lab() -> Finding:
    from yalis.study.lab.hosts import missing

    reason = missing()
    return Finding("ranks", "lab", reason is None, reason or "hosts as network namespaces can be made: yalis lab")


def _communication(device: torch.device) -> Iterator[Finding]:
    from yalis.comm.base import BACKENDS
    from yalis.launch.launchers import OPEN_MPI
    from yalis.launch.world import World

    world = World.single_process()
    for name in BACKENDS.names():
        reason = BACKENDS.load(name).unusable(world, device)
        usable = f"usable if {OPEN_MPI.name} starts the ranks" if name == "mpi" else "usable"
        yield Finding(f"communication on {device.type}", name, reason is None, reason or usable)


def _attention(device: torch.device) -> Iterator[Finding]:
    """Asked for the shape of a Llama 8B; a model with other heads, a window or a softcap may be answered otherwise."""
    import torch

    from yalis.attention.base import BACKENDS, AttentionNeeds
    from yalis.engine.device import resolve_block_size

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = resolve_block_size(None, device)
    needs = AttentionNeeds(num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, device=device, block_size=size)
    for name in BACKENDS.names():
        try:
            reason = BACKENDS.load(name).unusable(needs)
        except ImportError as error:
            reason = f"{error.name or error} is not installed"
        yield Finding(f"attention on {device}", name, reason is None, reason or "usable")

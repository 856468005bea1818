"""Check which packages, devices, backends and networks are usable here, and give the reason for those that are not.
Under srun, torchrun or mpirun it checks every rank and shows where they differ."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from yalis import __version__, env
from yalis.cache_folders import SET_CACHE, why_not_used
from yalis.cli.flags import HELP, add_common_flags, parse_float
from yalis.errors import YalisError, count_of
from yalis.launch.launchers import detect_launcher, process_rank
from yalis.study.cluster.finding import IMPOSSIBLE, OK, WARNING, Finding, RankFinding, merge_ranks

if TYPE_CHECKING:
    import torch

    from yalis.launch.world import World

_DTYPES = ("float32", "bfloat16", "float16")
REQUIRED = ("torch", "numpy", "transformers")
_OPTIONAL = {
    "gguf": "only needed for GGUF files",
    "jinja2": "only needed for chat templates",
    "accelerate": "only needed for `yalis bench --peer transformers` with a GGUF file",
    "triton": "only needed for the triton attention backend",
    "mpi4py": "only needed for --allreduce mpi",
    "matplotlib": "only needed for plots",
    **dict.fromkeys(("fastapi", "uvicorn", "httptools", "prometheus_client"), "only needed for `yalis serve`"),
}


_MARKS = {OK: "ok", WARNING: "!!", IMPOSSIBLE: "--"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join-timeout", type=parse_float, metavar="SECONDS", default=60.0,
        help="time limit for all ranks of a launcher to join (default: 60)",
    )  # fmt: skip
    parser.add_argument("--insecure-rendezvous", action="store_true", help=HELP["insecure_rendezvous"])
    add_common_flags(parser, json="print one object per line")


def run(args: argparse.Namespace) -> int:
    try:
        ranks = detect_launcher().size
    except YalisError:  # a finding about the launcher explains it
        ranks = 1
    if ranks > 1:
        return _run_on_ranks(args)
    return _print((RankFinding(finding, (0,), False) for finding in examine()), args.json)


def _run_on_ranks(args: argparse.Namespace) -> int:
    """Examine all ranks of a launcher, and print one table on rank 0."""
    from yalis.launch.join import join
    from yalis.launch.serving import serving

    try:
        world = join(detect_launcher().size, (), args.join_timeout, args.insecure_rendezvous)
    except YalisError as error:
        if process_rank():
            raise
        not_joined = Finding("ranks", "join", False, str(error), needed=True)
        return _print((RankFinding(finding, (0,), False) for finding in (*examine(), not_joined)), args.json)
    findings: list[Finding] = []
    with serving(world) if world.rank else nullcontext():
        findings = list(examine(world))
        gathered = world.all_gather_object([finding.to_json() for finding in findings])
    if world.rank:
        return 0
    table = merge_ranks([[Finding.from_json(one) for one in rank] for rank in gathered])
    status = _print(table, args.json, with_ranks=True)
    world.close()
    return status


def _print(findings: Iterable[RankFinding], as_json: bool, with_ranks: bool = False) -> int:
    """Print findings as they come. Returns 1 if something is missing that everything needs, else 0."""
    missing_required = False
    area = ""
    for one in findings:
        finding = one.finding
        missing_required |= finding.needed and not finding.usable
        if as_json:
            print(json.dumps(one.to_json() if with_ranks else finding.to_json()), flush=True)
            continue
        if finding.area != area:
            area = finding.area
            print(area)
        print(f"  {_MARKS[finding.status]}  {finding.name + ' ':<14}{one.detail}", flush=True)
    return 1 if missing_required else 0


def examine(world: World | None = None) -> Iterator[Finding]:
    """Yield the findings area by area, as soon as each check is done. `world`: the ranks of a launcher."""
    yield Finding("software", "yalis", True, __version__, needed=True)
    yield Finding("software", "python", True, platform.python_version(), needed=True)
    yield from _packages()
    yield _cache()
    try:
        import torch
    except (ImportError, OSError):  # an incomplete installation fails while loading its libraries
        return
    yield _native()
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        yield _device(device)
    if len(devices) == 1:
        yield Finding("devices", "cuda", False, "torch sees no GPU")
    for device in devices[:2]:  # the GPUs of one machine are assumed to be equal
        yield from _attention(device)
    yield _launcher(world)
    yield _lab()
    for device in devices[:2]:
        yield from _communication(device, world)
    from yalis.launch.world import World
    from yalis.study.cluster.gpu_checks import check_gpus
    from yalis.study.cluster.rank_checks import check_rank

    yield from check_rank(world or World.single_process())
    yield from check_gpus()


def _packages() -> Iterator[Finding]:
    from yalis.machine import package_version

    for name in (*REQUIRED, *_OPTIONAL):
        version = package_version(name)
        if name == "torch":
            yield _torch(version)
        elif version is not None:
            yield Finding("software", name, True, version, needed=name in REQUIRED)
        else:
            yield Finding("software", name, False, how_to_install(name), needed=name in REQUIRED)


def how_to_install(package: str) -> str:
    """Return "not installed", what the package is needed for unless nothing runs without it, and the command."""
    purpose = f"{_OPTIONAL[package]}: " if package in _OPTIONAL else ""
    return f"not installed; {purpose}pip install {package}"


def _torch(version: str | None) -> Finding:
    if version is None:
        return Finding("software", "torch", False, how_to_install("torch"), needed=True)
    try:
        import torch

        from yalis.engine.device import MIN_TORCH, torch_is_too_old
    except (ImportError, OSError) as error:
        return Finding("software", "torch", False, f"{version} does not load: {error}", needed=True)
    if torch_is_too_old():
        oldest = ".".join(map(str, MIN_TORCH))
        detail = f"{torch.__version__} is too old; {oldest} or newer is needed: pip install -U torch"
        return Finding("software", "torch", False, detail, needed=True)
    return Finding("software", "torch", True, torch.__version__, needed=True)


def _cache() -> Finding:
    """Check that the cache directory can be written; if it does not exist yet, its nearest existing parent."""
    folder = env.cache_dir()
    if (refusal := why_not_used(folder)) is not None:
        return Finding("software", "cache", False, refusal)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("software", "cache", True, f"{folder}{'' if existing == folder else ' (not created yet)'}")
    except OSError:
        return Finding("software", "cache", False, f"{folder} cannot be written; {SET_CACHE}")


def _native() -> Finding:
    from yalis.kernels import native

    library = native.load()
    if library is not None:
        return Finding("software", "native", True, f"CPU kernels built for this machine: {library.path}")
    return Finding("software", "native", False, f"no CPU kernels, using plain torch instead: {native.reason()}")


def _device(device: torch.device) -> Finding:
    import torch

    from yalis.study.bandwidth import describe_device

    facts = describe_device(device)
    detail = facts["name"]
    if device.type == "cuda":
        detail += f", {facts['memory_gib']} GiB, capability {facts['capability']}, CUDA {facts['cuda']}"
    else:
        detail += f", {count_of(facts['threads'], 'thread')}"
    dtypes = []
    for name in _DTYPES:
        try:
            square = torch.ones(8, 8, device=device, dtype=getattr(torch, name))
            dtypes += [name] if (square @ square)[0, 0].item() == 8 else []
        except RuntimeError:
            continue
    return Finding("devices", str(device), bool(dtypes), f"{detail}; supports {', '.join(dtypes) or 'no dtype'}")


def _launcher(world: World | None) -> Finding:
    if world is not None:
        hosts = len({member.node for member in world.members})
        placed = f"{count_of(world.size, 'rank')} on {count_of(hosts, 'host')}"
        return Finding("ranks", "launcher", True, f"{detect_launcher().launcher}, {placed}")
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
    return Finding(
        "ranks", "lab", reason is None, reason or "usable: `yalis lab` can create hosts as network namespaces"
    )


def _communication(device: torch.device, world: World | None) -> Iterator[Finding]:
    from yalis.comm.base import BACKENDS
    from yalis.launch.launchers import OPEN_MPI
    from yalis.launch.world import World

    world = world or World.single_process()
    for name in BACKENDS.names():
        reason = BACKENDS.load(name).unusable(world, device)
        usable = f"usable if {OPEN_MPI.name} starts the ranks" if name == "mpi" else "usable"
        yield Finding(f"communication on {device.type}", name, reason is None, reason or usable)


def _attention(device: torch.device) -> Iterator[Finding]:
    """Check the attention backends for the shape of Llama 8B; other shapes, windows or softcaps may differ."""
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

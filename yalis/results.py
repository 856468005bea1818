"""One schema for every measurement: what was run, where, with which versions, and a table of rows.

A result is a JSON object that is checked when it is written and when it is read, so a plot or a report never meets a
file it half understands. Host names are left out on purpose: results are published.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.result_forms import check_form
from yalis.result_rows import check_rows, columns_since
from yalis.version import __version__

SCHEMA = "yalis-result"
VERSION = 4


@dataclass(frozen=True)
class Result:
    kind: str
    parameters: dict[str, Any]
    rows: list[dict[str, Any]]
    command: str
    devices: list[dict[str, Any]]
    topology: dict[str, Any] | None  # ranks, how many each host has, who started them; None: not told
    created: str
    versions: dict[str, str | None]
    host: dict[str, Any]
    revision: str | None  # of the checkout it ran from, with -dirty when that had changes
    schema: str = SCHEMA
    schema_version: int = VERSION
    notes: list[str] = field(default_factory=list)


def new(
    kind: str,
    parameters: dict[str, Any],
    rows: list[dict[str, Any]],
    command: str,
    devices: list[dict[str, Any]],
    notes: list[str] | None = None,
    topology: dict[str, Any] | None = None,
) -> Result:
    """A result of this process, now, with everything around the rows filled in."""
    result = Result(
        kind=kind,
        parameters=parameters,
        rows=rows,
        command=command,
        devices=devices,
        topology=topology,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        host=host(),
        revision=revision(),
        notes=notes or [],
    )
    check(asdict(result), "this result")
    return result


def write(result: Result, folder: Path) -> Path:
    """Write into `folder`, whole or not at all, under a name made of kind and time."""
    data = asdict(result)
    check(data, "this result")
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    stamp = result.created.replace(":", "").replace("-", "")[:15]
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _free_name(folder, f"{result.kind}-{stamp}")
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{result.kind}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise YalisFailure(f"cannot write a result into {folder}: {error.strerror}; give another folder") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def _free_name(folder: Path, stem: str) -> Path:
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def read(path: Path) -> Result:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a file that a yalis benchmark wrote") from error
    except (ValueError, RecursionError) as error:
        raise YalisError(f"{path} is not JSON ({error}); give a file that a yalis benchmark wrote") from error
    data = _upgrade(data)
    check(data, str(path))
    return Result(**data)


def _upgrade(data: Any) -> Any:
    """An older version told less: the first no topology, and each of them fewer columns."""
    if not isinstance(data, dict) or data.get("schema_version") not in range(1, VERSION):
        return data
    told = {"topology": None, **data, "schema_version": VERSION}
    old, kind, rows = data["schema_version"], str(data.get("kind")), data.get("rows")
    if isinstance(rows, list):
        told["rows"] = [
            {**dict.fromkeys(columns_since(kind, old)), **row} if isinstance(row, dict) else row for row in rows
        ]
    return told


def check(data: Any, label: str) -> None:
    """Raise a sentence naming the first thing in `data` that the schema does not allow."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise YalisError(f"{label} is not a yalis result; give a file that a yalis benchmark wrote")
    if data.get("schema_version") != VERSION:
        raise YalisError(
            f"{label} has schema version {data.get('schema_version')!r}, and this yalis reads versions 1 to {VERSION}; "
            "run the benchmark again, or read it with the yalis that wrote it"
        )
    kinds: dict[str, tuple[type, ...]] = {
        "kind": (str,), "parameters": (dict,), "rows": (list,), "command": (str,), "devices": (list,),
        "topology": (dict, type(None)), "created": (str,), "versions": (dict,), "host": (dict,),
        "revision": (str, type(None)), "schema": (str,), "schema_version": (int,), "notes": (list,),
    }  # fmt: skip
    assert set(kinds) == {f.name for f in fields(Result)}
    for name, accepted in kinds.items():
        if name not in data:
            raise YalisError(f"{label} has no {name!r}; it is not a whole yalis result")
        if not isinstance(data[name], accepted):
            raise YalisError(f"{label} has a {name!r} of type {type(data[name]).__name__}; it is not a yalis result")
    if extra := sorted(set(data) - set(kinds)):
        raise YalisError(f"{label} has a field {extra[0]!r} that a yalis result does not have")
    check_rows(data["kind"], data["rows"], label)
    _check_created(data["created"], label)
    if word := check_form(data):
        raise YalisError(f"{label} has {word}")


def _check_created(created: str, label: str) -> None:
    try:
        known = datetime.fromisoformat(created).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise YalisError(f"{label} was created {created!r}; it should be a time such as 2026-01-31T12:00:00+00:00")


def age(path: Path, result: Result) -> tuple[datetime, int, str]:
    """Sorts results from the oldest to the newest; of one second, in the order in which names are given."""
    return datetime.fromisoformat(result.created), len(path.name), path.name


def topology(nodes: Sequence[int], launcher: str = "") -> dict[str, Any]:
    """`nodes`: for each rank, in order, the number of its machine. `launcher`: who started them, if not rank 0."""
    return {"ranks": len(nodes), "ranks_per_host": list(Counter(nodes).values()), "launcher": launcher}


def machine(result: Result) -> dict[str, Any]:
    """What kind of machine a result is from. Results of different ones are never joined into one ratio."""
    named = ("type", "name", "memory_gib", "capability")
    devices = [{name: device[name] for name in named if name in device} for device in result.devices]
    facts = {"cpu": result.host.get("cpu"), "machine": result.host.get("machine"), "devices": devices}
    if any(device.get("type") == "cpu" for device in devices):  # a GPU's job may have any share of the cores
        facts["cores"] = result.host.get("cores")
    return facts


def versions() -> dict[str, str | None]:
    # By name, because the package's face knows the engine, which lies above this file.
    own = __version__
    found: dict[str, str | None] = {"yalis": own, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "gguf"):
        found[package] = package_version(package)
    return found


def package_version(package: str) -> str | None:
    """The installed version, read without importing the package; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def host() -> dict[str, Any]:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 0
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
    }


def usable_cores() -> int:
    """Cores this process may run on, which a job scheduler may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """The commit this package runs from, when it runs from a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""Create, write, read and check results.

A result is checked when it is written and again when it is read, so compare, report and plots can rely on its schema.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from yalis import machine
from yalis.errors import YalisError, YalisFailure
from yalis.study.results.registry import KINDS, kind_named
from yalis.study.results.result import SCHEMA, VERSION, Result, Row

_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "kind": (str,), "parameters": (dict,), "rows": (list,), "command": (str,), "devices": (list,),
    "topology": (dict, type(None)), "created": (str,), "versions": (dict,), "host": (dict,),
    "revision": (str, type(None)), "schema": (str,), "schema_version": (int,), "notes": (list,),
}  # fmt: skip
assert set(_FIELD_TYPES) == {field.name for field in fields(Result)}


def new(
    kind: str,
    parameters: dict[str, Any],
    rows: list[Row],
    command: str,
    devices: list[dict[str, Any]],
    notes: list[str] | None = None,
    topology: dict[str, Any] | None = None,
) -> Result:
    """Return a checked result that was measured now on this host.

    `devices`: values of `bandwidth.describe_device`; `topology`: of `topology.llm_topology`; `parameters`: those
    that the kind declares, with the EngineConfig as `engine`.
    """
    result = Result(
        kind=kind,
        parameters=parameters,
        rows=rows,
        command=command,
        devices=devices,
        topology=topology,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=machine.versions(),
        host=machine.host(),
        revision=machine.revision(),
        notes=notes or [],
    )
    check(asdict(result), "this result")
    return result


def write(result: Result, folder: Path, name: str | None = None) -> Path:
    """Write atomically into `folder` as NAME.json, replacing it, or under a name made of kind and time.

    Returns the path."""
    data = asdict(result)
    check(data, "this result")
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    stamp = result.created.replace(":", "").replace("-", "")[:15]
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _unused_path(folder, f"{result.kind}-{stamp}") if name is None else folder / f"{name}.json"
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


def _unused_path(folder: Path, stem: str) -> Path:
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def read(path: Path) -> Result:
    """Read and check a result. Files of older schema versions are upgraded."""
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
    """Return the JSON object of a result in today's schema version; anything else as it is."""
    if not isinstance(data, dict) or data.get("schema_version") not in range(1, VERSION):
        return data
    upgraded = {"topology": None, **data, "schema_version": VERSION}  # version 1 had no topology
    kind = KINDS.get(str(data.get("kind")))
    return upgraded if kind is None else kind.upgrade(upgraded, data["schema_version"])


def check(data: Any, label: str) -> None:
    """Raise an error that names the first violation of the schema in `data`. `label` names the result."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise YalisError(f"{label} is not a yalis result; give a file that a yalis benchmark wrote")
    if data.get("schema_version") != VERSION:
        raise YalisError(
            f"{label} has schema version {data.get('schema_version')!r}, but this yalis reads versions 1 to {VERSION}; "
            "run the benchmark again, or use the yalis that wrote it"
        )
    for name, accepted in _FIELD_TYPES.items():
        if name not in data:
            raise YalisError(f"{label} has no {name!r}; it is not a complete yalis result")
        if not isinstance(data[name], accepted):
            raise YalisError(f"{label} has a {name!r} of type {type(data[name]).__name__}; it is not a yalis result")
    if extra := sorted(set(data) - set(_FIELD_TYPES)):
        raise YalisError(f"{label} has an unknown field {extra[0]!r}")
    kind = kind_named(data["kind"], label)
    _check_created(data["created"], label)
    kind.check(data, label)


def _check_created(created: str, label: str) -> None:
    try:
        has_zone = datetime.fromisoformat(created).tzinfo is not None
    except ValueError:
        has_zone = False
    if not has_zone:
        raise YalisError(f"{label} was created {created!r}; it should be a time such as 2026-01-31T12:00:00+00:00")

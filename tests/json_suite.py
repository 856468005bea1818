"""The JSON-Schema-Test-Suite, as the source distribution of the jsonschema package has it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parents[1] / "build" / "json-schema-test-suite"
#: Drafts that llguidance knows, the newest first.
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")


@dataclass(frozen=True)
class SuiteCase:
    """One schema of the suite, and JSON values that are valid for it or not."""

    draft: str
    file: str
    description: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]  # (value, valid)

    @property
    def name(self) -> str:
        return f"{self.draft}/{self.file}: {self.description}"


@lru_cache
def load_suite() -> list[SuiteCase]:
    """Return the schemas of all drafts, each once; skips the test if the suite cannot be downloaded."""
    cases, seen = [], set()
    with tarfile.open(_find_archive()) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: (one.name.count("/"), one.name)):
            draft, _, name = member.name.partition("json/tests/")[2].partition("/")
            if draft not in DRAFTS or not name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            for group in json.load(file):
                text = json.dumps(group["schema"])
                if text not in seen:
                    seen.add(text)
                    tests = tuple((one["data"], one["valid"]) for one in group["tests"])
                    cases.append(SuiteCase(draft, name, group["description"], group["schema"], tests))
    return sorted(cases, key=lambda case: DRAFTS.index(case.draft))


def _find_archive() -> Path:
    """Return the source distribution of the installed version of jsonschema, downloaded on first use."""
    version = metadata.version("jsonschema")
    path = _FOLDER / f"jsonschema-{version}.tar.gz"
    if not path.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
        command += ["--dest", str(_FOLDER), f"jsonschema=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode != 0 or not path.is_file():
            pytest.skip(f"the sources of jsonschema {version}, which have the suite, could not be downloaded")
    return path

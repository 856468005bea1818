"""The emulated hosts of `yalis lab`, for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.system.processes import environment
from yalis.study.lab.hosts import Lab, missing


class Hosts(Lab):
    """Skips the test with the reason if hosts cannot be created; their processes get the environment of tests."""

    def __init__(self, hosts: int, delay: float | str = 0.0, rate: float | str | None = None) -> None:
        if reason := missing():
            pytest.skip(reason)
        super().__init__(hosts, delay, rate)

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        return super().run(host, argv, environment(env), **options)

"""The lab's hosts, as tests use them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.system.processes import environment
from yalis.study.lab.hosts import Lab, missing


class Hosts(Lab):
    """A test that cannot have them skips and says why; processes on them get what tests' processes get."""

    def __init__(self, hosts: int, delay: float | str = 0.0, rate: float | str | None = None) -> None:
        if reason := missing():
            pytest.skip(reason)
        super().__init__(hosts, delay, rate)

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        return super().run(host, argv, environment(env), **options)

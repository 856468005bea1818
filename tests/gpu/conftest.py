"""Fixtures for tests that run several ranks on one GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.mps import Mps


@pytest.fixture(scope="module")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mps]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    daemon = Mps(tmp_path_factory.mktemp("mps"))
    daemon.start()
    yield daemon
    daemon.stop()

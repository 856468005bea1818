"""Fixtures of the tests that run an engine on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launchers.launch import make_model
from tests.multiprocess.engine_job import ForkServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    fork_server = ForkServer(tmp_path_factory.mktemp("jobs"))
    yield fork_server
    fork_server.close()

"""What the tests of whole engines in this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launchers.launch import make_model
from tests.multiprocess.engine_job import Nursery


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("jobs"))
    yield nursery
    nursery.close()

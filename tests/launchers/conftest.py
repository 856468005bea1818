"""One Slurm for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.launchers.slurm import Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    with Slurm() as running:
        yield running

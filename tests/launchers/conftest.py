"""A Slurm and a model shared by all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.launchers.launch import make_model, one_rank_tokens
from tests.launchers.slurm import Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    with Slurm() as running:
        yield running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokens(model: str) -> list[list[int]]:
    """The tokens that a single rank generates."""
    return one_rank_tokens(model)

"""The test transport of NVSHMEM, without NVSHMEM: what it carries arrives, and disorder is real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SELFTEST = Path(__file__).with_name("transport_selftest.cpp")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: Settings, and whether a signal without a fence overtakes its data.
NETWORKS: dict[str, tuple[dict[str, int], bool]] = {
    "plain": ({}, False),
    "in order, 20 us per operation": ({"IN_ORDER": 1, "OPERATION_US": 20, "GBPS": 10}, False),
    "reordered": ({"REORDER": 1, "JITTER_US": 10_000, "HOLD_US": 20, "DELAY_US": 5}, True),
}


@pytest.fixture(scope="module")
def selftest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("transport") / "selftest"
    command = ["g++", "-std=c++17", "-O1", "-Wall", f"-I{ROOT / 'csrc/test_transport'}", str(SELFTEST), "-o", str(out)]
    subprocess.run([*command, "-ldl", "-lrt", "-lpthread"], check=True, timeout=200)
    return out


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_everything_arrives(selftest: Path, network: str, ranks: int, tmp_path: Path) -> None:
    """Words, signals after a fence, atomics and gets between processes; what is not registered is refused."""
    settings, disorder = NETWORKS[network]
    variables = {f"TESTNET_{name}": str(value) for name, value in settings.items()}
    done = subprocess.run(
        [selftest, str(ranks), "12"], capture_output=True, text=True, timeout=110,
        env={**os.environ, **variables, "TESTNET_HOST_ONLY": "1", "TESTNET_COUNTS": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    torn = re.search(r"torn without a fence: (\d+)", done.stdout)
    assert torn is not None
    assert (int(torn[1]) > 0) == disorder
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert min(count["puts"] for count in counts) > 30
    assert all(count["from_proxy"] > count["puts"] for count in counts)
    assert (sum(count["overtaken"] for count in counts) > 0) == disorder

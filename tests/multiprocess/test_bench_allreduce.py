"""`yalis bench allreduce` with real ranks: its result, and that it notices wrong sums."""

from __future__ import annotations

import json
from pathlib import Path

from tests.multiprocess.engine_job import ForkServer
from yalis.comm.hierarchical import HierarchicalBackend
from yalis.study import results

SIZES = ["--sizes", "12,16K", "--repeats", "6", "--warmup", "2", "--device", "cpu"]
# Each goes wrong in its own way: one rank alone has another sum, one rank has other bits, nothing is summed at all.
BROKEN = """
import sys
from yalis.cli.main import main
from yalis.comm.base import BACKENDS
from yalis.comm.custom_allreduce import CustomAllReduceGroup, CustomAllReduceBackend

class Group(CustomAllReduceGroup):
    def all_reduce(self, x, out=None):
        total = self.torch_group.all_reduce(x, out)
        if self.rank == 1:
            total.view(-1)[-1] *= self.factor
        return total

class Lazy(CustomAllReduceGroup):
    def all_reduce(self, x, out=None):
        return x if out is None else out

class Backend(CustomAllReduceBackend):
    def wrap_group(self, torch_group, name, ranks):
        group = (Lazy if self.name == "lazy" else Group)(torch_group)
        group.factor = {"rank": 2, "bits": 1 + 2**-23}.get(self.name)
        return group

for name in ("rank", "bits", "lazy"):
    globals()[name] = type(name, (Backend,), {"name": name})
    BACKENDS._entries[name] = f"__main__:{name}"
sys.exit(main(ARGUMENTS))
"""


# A backend that fails unless the benchmark passes its options.
CHOOSY = """
import sys
from yalis.cli.main import main
from yalis.comm.base import BACKENDS
from yalis.comm.custom_allreduce import CustomAllReduceGroup, CustomAllReduceBackend

class Group(CustomAllReduceGroup):
    def all_reduce_with(self, x, out, times):
        assert times in (1, 2)
        return self.torch_group.all_reduce(x, out)

    def all_reduce(self, x, out=None):
        raise AssertionError

class choosy(CustomAllReduceBackend):
    @staticmethod
    def candidate_options(size):
        return [{"times": 1}, {"times": 2}]

    def wrap_group(self, torch_group, name, ranks):
        return Group(torch_group)

BACKENDS._entries["choosy"] = "__main__:choosy"
sys.exit(main(ARGUMENTS))
"""


def test_the_command_starts_its_own_ranks(fork_server: ForkServer) -> None:
    asked = ["--ranks", "2", "--ranks-per-node", "1", "--backends", "gloo,hierarchical", "--dtypes", "float32,bfloat16"]
    ended = fork_server.run(["bench", "allreduce", *asked, *SIZES, "--json"])
    assert ended.statuses == [0], ended.errors
    result = json.loads(ended.outputs[0])
    results.check(result, "what was printed")
    assert [(row["dtype"], row["bytes"], row["backend"]) for row in result["rows"]] == [
        (dtype, size, backend)
        for dtype in ("float32", "bfloat16")
        for size in (12, 16384)
        for backend in ("gloo", "hierarchical")
    ]
    assert {(row["status"], row["mode"], row["checked"]) for row in result["rows"]} == {("ok", "eager", 4)}
    for row in result["rows"]:
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"]
        assert (row["speedup"] == 1) == (row["backend"] == "gloo")
    assert (result["parameters"]["shape"], result["parameters"]["start"]) == ("2x1", "clock")
    assert result["topology"] == {"ranks": 2, "ranks_per_host": [2], "launcher": ""}  # hosts as they are


def test_wrong_sums_are_found_by_launched_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    arguments = ["bench", "allreduce", *SIZES, "--backends", "rank,torch,bits,lazy", "--json"]
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.replace("ARGUMENTS", repr(arguments)))
    ended = fork_server.run([str(script)], ranks=2)
    assert ended.statuses == [1, 0], ended.errors
    assert not ended.outputs[1]
    statuses = {row["backend"]: row["status"] for row in json.loads(ended.outputs[0])["rows"] if row["bytes"] == 12}
    assert statuses == {
        "rank": "wrong: 1 of 3 elements are not the sum on rank 1",
        "torch": "ok",
        "bits": "wrong: not the bits of rank 0 on rank 1",
        "lazy": "wrong: 3 of 3 elements are not the sum on rank 0",
    }
    assert ended.errors.startswith("yalis: error: 6 of 8 settings gave wrong sums, the first rank with 12 bytes"), (
        ended.errors
    )


def test_tuning_measures_the_options_and_saves_the_times(fork_server: ForkServer, tmp_path: Path) -> None:
    arguments = ["bench", "allreduce", *SIZES, "--tune", "--ranks-per-node", "1", "--json"]
    script = tmp_path / "choosy.py"
    backends = ["--backends", "choosy,gloo,hierarchical"]
    keep = f"import os\nos.environ['YALIS_CACHE'] = {str(tmp_path)!r}\n"
    script.write_text(keep + CHOOSY.replace("ARGUMENTS", repr(arguments + backends)))
    ended = fork_server.run([str(script)], ranks=2)
    assert ended.statuses == [0, 0], ended.errors
    rows = json.loads(ended.outputs[0])["rows"]
    tried = HierarchicalBackend.candidate_options(12)
    assert [(row["backend"], row["options"]) for row in rows if row["bytes"] == 12] == [
        ("choosy", {"times": 1}),
        ("choosy", {"times": 2}),
        ("gloo", {}),
        *(("hierarchical", options) for options in tried),
    ]
    held = json.loads((tmp_path / "tuning" / "cpu-2x1.json").read_text())["timings"]
    assert {timing["choice"]["backend"] for timing in held} == {"choosy", "hierarchical"}  # what auto can choose from
    assert len(held) == 2 * (2 + len(tried))
    assert ended.errors.count("\n") == 3, ended.errors  # the best for each size, and where it is written

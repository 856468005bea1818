"""Helpers of the launcher tests: starting commands, and a small model that splits unevenly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.families import Case
from tests.system.processes import environment
from yalis import LLM, SamplingParams
from yalis.launch.launchers import OPEN_MPI_OVERSUBSCRIBE

YALIS = str(Path(sys.executable).with_name("yalis"))
# As root, with more ranks than cores.
MPIRUN = ["mpirun", "--allow-run-as-root", *OPEN_MPI_OVERSUBSCRIBE]

# 9 heads, 3 key/value heads, 3 layers and a prime vocabulary: no split of it is even.
MODEL = Case(
    "uneven",
    "LlamaConfig",
    {"hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3},
)
PROMPTS = [[5, 17, 99, 3], [200, 8, 41, 41, 7, 120, 33]]
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 11, "ignore_eos": True}


def make_model(folder: Path) -> str:
    path = folder / MODEL.name
    MODEL.build(seed=1).save_pretrained(path)
    return str(path)


def one_rank_tokens(model: str) -> list[list[int]]:
    """Return the tokens of a single rank: greedy for the first prompt, sampled for the second."""
    with LLM(model, dtype="float32") as llm:
        outputs = llm.generate(PROMPTS, [SamplingParams(**GREEDY), SamplingParams(**SAMPLED)])
    return [output.token_ids for output in outputs]


def run(argv: Sequence[str], cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a launcher's command. After the timeout it gets SIGTERM, so that it can stop its ranks, before SIGKILL."""
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, err = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            raise AssertionError(f"{argv[0]} took more than {timeout} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def objects(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """Return the JSON objects that a successful command printed, one per line."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]

"""Data-parallel replicas as processes: the answers of one rank, and batch jobs that resume whichever rank dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launch_job import LAUNCHER_PREFIXES, ROOT
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams
from yalis.cli.main import main
from yalis.engine.replicas import ReplicaRouter

ENGINE = {"max_num_seqs": 2, "kv_blocks": 64, "threads": 1, "dtype": "float32"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


def make_lines(count: int) -> list[dict[str, Any]]:
    """Short and long, greedy and drawn, with some that have several answers, a stop string or no prompt."""
    rng = random.Random(5)
    lines = []
    for number in range(count):
        text = "".join(rng.choice("abcdef ") for _ in range(rng.randint(1, 60)))
        most = 120 if number % 10 == 3 else rng.randint(1, 24)
        line = {"custom_id": f"q{number}", "prompt": text, "max_tokens": most, "temperature": rng.choice([0, 1.0])}
        line |= {"n": 2} if number % 11 == 5 else {"stop": ["a", "e"]} if number % 11 == 7 else {"ignore_eos": True}
        lines.append(line)
    lines[4]["prompt"] = ""
    return lines


def save(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_answers(path: Path) -> dict[str, Any]:
    """By id; every line is whole and every id there once."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    rows = [json.loads(line) for line in data.splitlines()]
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def answer_alone(source: Path, target: Path, model: str) -> dict[str, Any]:
    """What one rank answers."""
    assert main(["batch", str(source), str(target), "--model", model, *FLAGS]) == 0
    return read_answers(target)


class Batch:
    """A `yalis batch` in its own session, and the ranks it started, which carry its mark."""

    def __init__(self, source: Path, target: Path, model: str, *flags: str, torchrun: int = 0) -> None:
        self.mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        environment |= {"YALIS_TEST_MARK": self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
        command = [sys.executable, *launcher, "-m", "yalis", "batch", str(source), str(target), "--model", model]
        self.process = subprocess.Popen(
            [*command, *FLAGS, *flags], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.ranks().values():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    def ranks(self) -> dict[int, int]:
        """The pid of each rank that is there."""
        found = {} if self.process.poll() is not None else {0: self.process.pid}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"YALIS_TEST_MARK={self.mark}".encode() in variables:
                rank = next((v[len(b"YALIS_RANK=") :] for v in variables if v.startswith(b"YALIS_RANK=")), b"0")
                found[int(rank)] = int(path.name)
        return found

    def kill(self, rank: int, target: Path, size: int) -> None:
        """Once the results have grown to this size."""
        while self.process.poll() is None and (target.stat().st_size if target.exists() else 0) < size:
            time.sleep(0.0005)
        pid = self.ranks().get(rank)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def finish(self, within: float = 60) -> tuple[int, str]:
        """Status and errors; no rank may be left."""
        errors = self.process.communicate(timeout=within)[1]
        deadline = time.monotonic() + 10
        while (left := self.ranks()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        return self.process.returncode, errors


def kill_and_resume(tmp_path: Path, model: str, victims: list[int], flags: list[str], seed: int) -> None:
    source, target, rng = save(tmp_path / "in", make_lines(80)), tmp_path / "out", random.Random(seed)
    undisturbed = answer_alone(source, tmp_path / "whole", model)
    part = (tmp_path / "whole").stat().st_size // (len(victims) + 1)
    reached = 0
    for victim in victims:
        with Batch(source, target, model, *flags) as batch:
            batch.kill(victim, target, reached + rng.randint(1, part))
            status, errors = batch.finish()
        if victim == 0:
            assert status == -signal.SIGKILL, errors
        else:
            assert status == 1, errors
            assert f"rank {victim} on " in errors
            assert "killed by SIGKILL" in errors
        assert target.stat().st_size > reached, "nothing was done between two kills"
        reached = target.stat().st_size
    with Batch(source, target, model, *flags) as batch:
        status, errors = batch.finish()
        assert status == 0, errors
        assert f"holds all {len(undisturbed)} results, 1 of them errors" in errors
    assert read_answers(target) == undisturbed


def test_any_rank_of_a_job_may_be_killed(tmp_path: Path, model: str) -> None:
    kill_and_resume(tmp_path, model, [1, 0], ["--dp=2"], seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("flags", "ranks"), [(["--dp=2"], 2), (["--dp=3"], 3), (["--tp=2", "--dp=2"], 4)])
def test_any_rank_of_any_job_may_be_killed(tmp_path: Path, model: str, flags: list[str], ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    kill_and_resume(tmp_path, model, [rng.randrange(ranks) for _ in range(6)], flags, seed)


def test_under_a_launcher_rank_0_writes(tmp_path: Path, model: str) -> None:
    source, target = save(tmp_path / "in", make_lines(20)), tmp_path / "out"
    with Batch(source, target, model, "--dp=2", torchrun=2) as batch:
        status, errors = batch.finish()
        assert status == 0, errors
    found = read_answers(target)
    assert len(found) == 20
    assert errors.count("holds all 20 results") == 1
    assert answer_alone(source, tmp_path / "alone", model) == found
    before = target.read_bytes()
    with Batch(source, target, model, "--dp=2", torchrun=2) as batch:  # nothing is left to do, so no model is made
        status, errors = batch.finish(within=30)
        assert status == 0, errors
    assert errors.count("; 20 were from an earlier run") == 1
    assert target.read_bytes() == before


def test_an_llm_of_replicas_is_an_llm(model: str) -> None:
    """Sampling, several answers, stop strings, streams, cancels and polls, with requests on both replicas."""
    prompts = ["abc " * 12 + letter for letter in "abcdefgh"]
    several = SamplingParams(max_tokens=12, n=3, seed=7)
    stopped = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, stop=["a", "b", "c", "d", "e", "f"])
    long = SamplingParams(max_tokens=150, ignore_eos=True, seed=3)
    with LLM(model, **ENGINE) as alone, LLM(model, dp=2, **ENGINE) as llm:
        router = llm._engine
        assert isinstance(router, ReplicaRouter)
        for sampling in (several, stopped):
            texts = [
                [(one.text, one.finish_reason) for one in output.completions]
                for output in llm.generate(prompts, sampling)
            ]
            assert texts == [
                [(one.text, one.finish_reason) for one in output.completions]
                for output in alone.generate(prompts, sampling)
            ]
        assert min(router.num_finished.values()) > 0
        assert llm.poll() == []  # at once, with nothing to do
        # Every replica has seen the prefix by now.
        cached = [output.completions[0].metrics.cached_tokens for output in llm.generate(prompts, stopped)]
        assert min(cached) >= 16
        # A stream that is left early cancels on both replicas.
        seen = set()
        for chunk in llm.stream(prompts, long):
            seen.add(chunk.prompt_index)
            if len(seen) == 4:
                break
        assert not router.has_work
        # Cancels while waiting, in flight and after the end.
        ids = [llm.submit(prompt, long) for prompt in prompts]
        llm.poll()
        for id in ids[1:]:
            llm.cancel(id)
        done: dict[int, Any] = {}
        while len(done) < len(ids):
            done.update(llm.poll())
        llm.cancel(ids[0])
        assert [done[id].completions[0].finish_reason for id in ids] == ["length"] + ["cancelled"] * 7
        assert done[ids[0]].text == alone.generate(prompts[0], long)[0].text
        assert llm.poll() == []
        assert not any(router._num_assigned.values())
        answers = llm.generate([[1], [2], [3]], SamplingParams(max_tokens=3, ignore_eos=True))  # and it goes on
        assert [len(output.token_ids) for output in answers] == [3, 3, 3]

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
    """Short and long requests, greedy and sampled; some have n=2, stop strings or no prompt."""
    rng = random.Random(5)
    lines = []
    for index in range(count):
        text = "".join(rng.choice("abcdef ") for _ in range(rng.randint(1, 60)))
        max_tokens = 120 if index % 10 == 3 else rng.randint(1, 24)
        line = {"custom_id": f"q{index}", "prompt": text, "max_tokens": max_tokens, "temperature": rng.choice([0, 1.0])}
        line |= {"n": 2} if index % 11 == 5 else {"stop": ["a", "e"]} if index % 11 == 7 else {"ignore_eos": True}
        lines.append(line)
    lines[4]["prompt"] = ""
    return lines


def save(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_answers(path: Path) -> dict[str, Any]:
    """Read the results by id; checks that every line is complete and every id unique."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    rows = [json.loads(line) for line in data.splitlines()]
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def answer_alone(source: Path, target: Path, model: str) -> dict[str, Any]:
    """Run the job on one rank."""
    assert main(["batch", str(source), str(target), "--model", model, *FLAGS]) == 0
    return read_answers(target)


class Batch:
    """A `yalis batch` process in its own session, and the ranks it started, found by a mark in their environment."""

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
        """Return the pid of each live rank."""
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
        """Kill the rank once the result file has this size."""
        while self.process.poll() is None and (target.stat().st_size if target.exists() else 0) < size:
            time.sleep(0.0005)
        pid = self.ranks().get(rank)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def finish(self, within: float = 60) -> tuple[int, str]:
        """Wait for the end; returns exit status and stderr, and checks that no rank is left."""
        errors = self.process.communicate(timeout=within)[1]
        deadline = time.monotonic() + 10
        while (left := self.ranks()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        return self.process.returncode, errors


def kill_and_resume(tmp_path: Path, model: str, victims: list[int], flags: list[str], seed: int) -> None:
    source, target, rng = save(tmp_path / "in", make_lines(80)), tmp_path / "out", random.Random(seed)
    uninterrupted = answer_alone(source, tmp_path / "whole", model)
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
        assert target.stat().st_size > reached, "no result was written between two kills"
        reached = target.stat().st_size
    with Batch(source, target, model, *flags) as batch:
        status, errors = batch.finish()
        assert status == 0, errors
        assert f"holds all {len(uninterrupted)} results, 1 of them errors" in errors
    assert read_answers(target) == uninterrupted


def test_a_job_resumes_after_any_rank_is_killed(tmp_path: Path, model: str) -> None:
    kill_and_resume(tmp_path, model, [1, 0], ["--dp=2"], seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("flags", "ranks"), [(["--dp=2"], 2), (["--dp=3"], 3), (["--tp=2", "--dp=2"], 4)])
def test_a_job_of_any_split_resumes_after_any_rank_is_killed(
    tmp_path: Path, model: str, flags: list[str], ranks: int, seed: int
) -> None:
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
    with Batch(source, target, model, "--dp=2", torchrun=2) as batch:  # the job is done, so no model is loaded
        status, errors = batch.finish(within=30)
        assert status == 0, errors
    assert errors.count("; 20 were from an earlier run") == 1
    assert target.read_bytes() == before


def test_llm_calls_over_two_replicas(model: str) -> None:
    """Sampling, n > 1, stop strings, streams, cancels and polls, with requests on both replicas."""
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
        # Other requests share the steps of a replica, so log probabilities are equal only up to rounding.
        scored = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
        pairs = zip(llm.generate(prompts, scored), alone.generate(prompts, scored), strict=True)
        for one, other in pairs:
            assert one.token_ids == other.token_ids
            logprobs, expected = ([token.logprob for token in output.logprobs or []] for output in (one, other))
            assert logprobs == pytest.approx(expected, abs=1e-4)
        assert min(router.num_finished.values()) > 0
        assert llm.poll() == []  # returns at once without work
        # The prefix is in the cache of every replica by now.
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

"""The batch job script resumes in a second run of its job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.launchers.launch import YALIS
from tests.launchers.slurm import Slurm
from tests.system.processes import ROOT
from yalis import LLM, SamplingParams

LINES, LENGTH = 20, 120


def test_the_batch_script_resumes_after_a_requeue(slurm: Slurm, model: str, tmp_path: Path) -> None:
    prompts = [[3 + (7 * line + index * index) % 240 for index in range(4 + line % 9)] for line in range(LINES)]
    requests, results, log = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "log.txt"))
    body = {"max_tokens": LENGTH, "ignore_eos": True}
    requests.write_text("".join(json.dumps({"prompt": prompt, **body}) + "\n" for prompt in prompts))
    options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", f"--output={log}", f"--chdir={tmp_path}"]
    flags = ["--model", model, "--dtype", "float32", "--tp", "1", "--dp", "2", "--max-num-seqs", "1"]
    submitted = slurm.run(
        ["sbatch", "--parsable", *options, str(ROOT / "slurm/batch-4gpu.sh"), str(requests), str(results), *flags],
        env={"PATH": f"{Path(YALIS).parent}:{os.environ['PATH']}"},
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    _wait(lambda: results.exists() and results.read_text().count("\n") >= 1, log)
    assert slurm.run(["scancel", "--signal=TERM", job]).returncode == 0  # as Slurm does before the time limit
    _wait(lambda: "run the same command again" in log.read_text(), log)
    first = results.read_text().splitlines()
    assert 1 <= len(first) < LINES
    _wait(lambda: not slurm.run(["squeue", "--noheader", f"--jobs={job}"]).stdout.strip(), log)
    assert "yalis: error" not in log.read_text()
    lines = results.read_text().splitlines()
    assert lines[: len(first)] == first
    answers = {answer["custom_id"]: answer["token_ids"] for answer in map(json.loads, lines)}
    assert len(lines) == len(answers) == LINES
    with LLM(model, dtype="float32") as llm:
        checked = range(0, LINES, 5)
        outputs = llm.generate([prompts[line] for line in checked], SamplingParams(**body))
    assert [answers[f"line-{line + 1}"] for line in checked] == [output.token_ids for output in outputs]


def _wait(ready: Callable[[], bool], log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, log.read_text() if log.exists() else "the job has not started"
        time.sleep(0.05)

"""A user's script under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.launchers.launch import GREEDY, PROMPTS, SAMPLED, run

SCRIPT = """
import json
import os
from yalis import LLM, SamplingParams

with LLM({model!r}, tp=2, dtype="float32") as llm:
    outputs = llm.generate({prompts}, [SamplingParams(**{greedy}), SamplingParams(**{sampled})])
    print(os.environ["RANK"], json.dumps([output.token_ids for output in outputs]), flush=True)
"""


def test_a_script_gets_its_results_on_rank_0(model: str, tokens: list[list[int]], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=model, prompts=PROMPTS, greedy=GREEDY, sampled=SAMPLED))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"0 {json.dumps(tokens)}", "1 []"]

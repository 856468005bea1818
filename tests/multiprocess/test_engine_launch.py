"""Engines over several ranks start from plain scripts, and refuse invalid splits before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.engine_job import Ended, ForkServer, environment, start
from tests.multiprocess.launch_job import HOST
from yalis import LLM, SamplingParams, __version__

PROMPT = [5, 17, 99, 3]

PLAIN = """
from yalis import LLM, SamplingParams
sampling = SamplingParams(max_tokens=2, ignore_eos=True)
llm = LLM({model!r}, tp=2, device="cpu", dtype="float32")
print(llm.generate([{prompt}], sampling)[0].token_ids)
print(llm.generate([{prompt}], sampling)[0].token_ids)
llm.close()
llm = LLM({model!r}, pp=2, device="cpu", dtype="float32")
print(llm.generate([{prompt}], sampling)[0].token_ids)
"""


def generate(model: str, *flags: str) -> list[str]:
    return ["generate", "--model", model, "--prompt-ids", "5,17,99,3", "--max-tokens", "8", "--device", "cpu", *flags]


def assert_refused(ended: Ended, message: str) -> None:
    """Every rank failed, and the message was printed once."""
    assert all(ended.statuses), ended.statuses
    assert not any(ended.outputs)
    assert ended.errors.count("\n") == 1, ended.errors
    line = ended.errors.rstrip()
    assert re.fullmatch(rf"yalis: (error: )?{message}", line), line


def test_a_plain_script_needs_no_main_guard_and_no_close(model: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(model=model, prompt=PROMPT))
    with LLM(model, device="cpu", dtype="float32") as llm:
        tokens = llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
    ended = start([sys.executable, str(script)], tmp_path).finish()
    assert (ended.statuses, ended.errors) == ([0], "")
    assert ended.outputs[0].splitlines() == [str(tokens)] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "64"), r"tp 64 leaves ranks without a shard: \S+ has 9 heads .*; give tp 1 to 9"),
        (("--tp", "1x7"), r"tp 1x7 cannot split the hidden size 72 of \S+ evenly over 7 columns; .*"),
        (("--pp", "99"), r"pp 99 leaves stages without a layer: \S+ has 3; give pp 1 to 3"),
    ],
    ids=["tp", "grid", "pp"],
)
def test_an_invalid_split_starts_no_rank_and_reads_no_weight(
    fork_server: ForkServer, model: str, tmp_path: Path, flags: tuple[str, str], message: str
) -> None:
    started, read = tmp_path / "started", tmp_path / "read"
    ended = fork_server.run(generate(model, *flags), fault=f"1 note arriving {started}")
    assert_refused(ended, message)
    assert ended.statuses == [2]
    assert not started.exists()
    ended = fork_server.run(generate(model, *flags), fault=f"0 note reading {read}")
    assert ended.statuses == [2]
    assert not read.exists()


def test_a_world_size_that_does_not_match_the_split(fork_server: ForkServer, model: str) -> None:
    ended = fork_server.run(generate(model, "--tp", "3"), 2)
    assert_refused(
        ended, r"this model is split over 3 ranks and torchrun started 2; type torchrun --nproc-per-node 3 .*"
    )
    assert ended.statuses == [2, 2]


def test_an_invalid_split_under_a_launcher(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    read = tmp_path / "read"
    ended = fork_server.run(generate(model, "--pp", "4"), 4, fault=f"1 note reading {read}")
    assert_refused(ended, r"pp 4 leaves stages without a layer: \S+ has 3; give pp 1 to 3")
    assert not read.exists()


def test_ranks_with_different_settings(fork_server: ForkServer, model: str) -> None:
    ended = fork_server.run(
        generate(model, "--tp", "2"), 2, each={1: {"argv": generate(model, "--tp", "2", "--dtype", "bfloat16")}}
    )
    assert_refused(
        ended, rf"the ranks do not agree: dtype is 'bfloat16' on rank 1 on {HOST} and 'auto' on rank 0 on .*"
    )


def test_ranks_with_different_models(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    ended = fork_server.run(generate(model, "--tp", "2"), 2, each={1: {"argv": generate(str(other), "--tp", "2")}})
    assert_refused(
        ended, rf"the ranks do not agree: model is '{other}' on rank 1 on {HOST} and '{model}' on rank 0 on .*"
    )


def test_ranks_with_different_models_of_the_same_name(fork_server: ForkServer, model: str, tmp_path: Path) -> None:
    each = {}
    for rank in range(2):
        folder = tmp_path / f"host{rank}"
        shutil.copytree(model, folder / "model")
        each[rank] = {"cwd": str(folder)}
    config = tmp_path / "host1" / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
    ended = fork_server.run(generate("./model", "--tp", "2"), 2, each=each)
    assert_refused(
        ended,
        rf"the ranks do not agree: the checkpoint's fingerprint is '\w+' on rank 1 on {HOST} and '\w+' on rank 0 .*",
    )


def test_ranks_with_different_versions(fork_server: ForkServer, model: str) -> None:
    ended = fork_server.run(generate(model, "--tp", "2"), 2, fault="1 age arriving")
    version = re.escape(__version__)
    assert_refused(
        ended, rf"rank 1 on {HOST} \(pid \d+\) runs yalis 0.0.0.other and rank 0 on {HOST} runs {version}; .*"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (generate("/nowhere", "--tp", "2"), "there is no '/nowhere'; give .*"),
        (["batch", "/nowhere.jsonl", "out.jsonl", "--tp", "2", "--device", "cpu"], "cannot read /nowhere.jsonl: .*"),
        (generate("MODEL", "--tp", "2", "--device", "cuda"), f"rank 0 on {HOST} sees no GPU; .*"),
    ],
    ids=["model", "input", "device"],
)
def test_an_error_on_rank_0_is_printed_once(fork_server: ForkServer, model: str, argv: list[str], message: str) -> None:
    begin = time.time()
    ended = fork_server.run([model if word == "MODEL" else word for word in argv], 2)
    assert_refused(ended, message)
    assert ended.statuses[0] == 2
    assert max(ended.times) - begin < 10


def test_a_closed_output_pipe(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "yalis", *generate(model, "--tp", "2")]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_engine_closed_with_steps_in_flight_is_followed_by_another(
    fork_server: ForkServer, model: str, tmp_path: Path
) -> None:
    """Steps are in flight between the stages when it is closed. Under a launcher the ranks stay for the next LLM."""
    script = tmp_path / "left.py"
    script.write_text(
        "from yalis import LLM, SamplingParams\n"
        "long = SamplingParams(max_tokens=40, ignore_eos=True)\n"
        f"for split in ({{'pp': 2, 'micro_batches': 8}}, {{'dp': 2}}):\n"
        f"    with LLM({model!r}, device='cpu', **split) as llm:\n"
        "        for chunk in llm.stream([[5, 6, 7 + i] for i in range(16)], long):\n"
        "            break\n"
        f"with LLM({model!r}, device='cpu', tp=2) as llm:\n"
        "    if llm.rank == 0:\n"
        "        print(len(llm.generate([[5, 6, 7]], long)[0].token_ids))\n"
    )
    ended = fork_server.run([str(script)], 2)
    assert ended.statuses == [0, 0], ended.errors
    assert ended.outputs == ["40\n", ""]

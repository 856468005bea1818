"""Runs the commands and the Python blocks of README, CONTRIBUTING and docs/, page by page and in order.

Each page has its own empty folder, next to the `benchmarks` and `slurm` folders of the repository, so a command finds
the files of the ones before it. `yalis` runs in this process, which has imported torch already; everything else runs
in bash. A command of a page is either run or in NOT_RUN.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, Block, steps
from tests.server import running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM
from yalis.cli.main import main

#: What is made smaller before it is run: (pattern, replacement). smollm2-135m becomes a random model of two layers.
SMALLER = [
    (r"--workload 8x64x32", "--workload 2x16x12"),
    (r"bench slice --model \S+ --tp 4,8 --batch 1,16", "bench slice --tp 2 --batch 1 --output-len 4 --repeats 1"),
    (r"seq 200", "seq 3"),
    (r"--prompt-len \d+ --output-len \d+ --repeats \d+", "--prompt-len 8 --output-len 4 --repeats 2"),
    (r"bench latency --batch (\S+) --out", r"bench latency --batch \1 --prompt-len 8 --output-len 4 --repeats 2 --out"),
    (
        r"bench kernels --rows 1,16,64",
        "bench kernels --rows 1 --layers 1 --context 8 --prompts 1 --prompt-len 8 --repeats 1",
    ),
    (r"bench pipeline --pp 2 --threads 1 --prompt-len 128", "bench pipeline --pp 2 --threads 1 --prompt-len 8"),
    (r"bench scaling --ranks 1,2 --schemes tp,pp", "bench scaling --ranks 1 --workload 1x4x2 --repeats 1"),
    (r"bench allreduce --ranks \d", "bench allreduce --ranks 2 --sizes 8K --repeats 3 --backends gloo,hierarchical"),
    (r"--rate 5", "--rate 50"),
    (r"--nodes 1-16 --workload poster", "--nodes 1-2 --workload 4x64x8"),
    (r"--tp 4$", "--tp 2"),
    (r"chat$", "chat --max-tokens 16"),
]

LOADS_A_MODEL = re.compile(r"yalis (generate|chat|batch|profile|bench (latency|throughput|scaling|slice|pipeline))\b")

URL = "http://127.0.0.1:8000"

GPU = "needs an NVIDIA GPU"
NETWORK = "needs network access, and changes the environment"
THIS = "is how this test is run"
SERVES = "runs until it is stopped; tests/multiprocess/test_serve.py"
SERVED = "needs a running server; test_study_serve.py runs it against one"
MEASURE = "yalis bench serve --url http://127.0.0.1:8000"
SLURM = "tests/multihost/test_serve.py runs it"
LAB = "needs root and takes minutes; tests/multihost runs it with small sizes"

#: Commands that are not run here, and why. Each must be in a page.
NOT_RUN = {
    "make serve": SERVES,
    "yalis serve": SERVES,
    "yalis serve --help": "exits Python; test_docs.py runs `--help` of every verb",
    "yalis serve --api-key-file key": SERVES,
    "yalis serve --max-model-len 1024": SERVES,
    "srun -n 2 yalis serve --tp 2 --host 0.0.0.0 --api-key-file key --announce url": "tests/launchers runs one",
    "pip install 'yalis[serve]'": NETWORK,
    **dict.fromkeys(
        (
            "llm-comply -u http://127.0.0.1:8000/v1 -k none -m smollm2-135m --format openai-chat -f "
            "chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response,"
            "chat-streaming-usage,chat-error-handling",
            "llm-comply -u http://127.0.0.1:8000/v1 -k none -m smollm2-135m --format open-responses -f "
            "basic-response,system-prompt,multi-turn,tool-calling,streaming-response,streaming-usage,assistant-phase,"
            "response-output-phase-schema,compact-response,compact-missing-model,error-handling",
        ),
        "needs a running server; tests/unit/test_server_tools.py runs its cases",
    ),
    "make demo": "CI runs it first; installs into .venv",
    "make demo TORCH='torch==2.12.0'": NETWORK,
    "make test": THIS,
    "make test SYSTEM=": THIS,
    "make test-full": THIS,
    "python benchmarks/threads.py": "takes minutes; test_benchmark_threads.py runs it with a tiny model",
    "python benchmarks/structured_outputs.py overhead": "takes a minute; test_structured_outputs.py runs it",
    "make faults": "takes 20 minutes; `make test` runs a pairwise cover of it",
    "make fuzz": "takes 10 minutes; test_fuzz.py runs some of its inputs",
    "make soak": "takes 10 minutes",
    "make serve-soak": "takes minutes; test_server_soak.py sends 500 of its requests",
    f"{MEASURE} --concurrency 1,8,64": SERVED,
    "guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000 --profile kind=concurrent,streams=4 "
    "--constraint kind=max_requests,count=20 --data kind=synthetic_text,prompt_tokens=32,output_tokens=32 "
    "--tokenizer kind=hf_auto,model=FOLDER --output kind=json,path=guidellm.json": "needs GuideLLM and a server",
    f"{MEASURE} --concurrency 1,8,64 --workload 64x128x128 --out results": SERVED,
    f"{MEASURE} --rate 1,2,4,8 --workload chat:200 --api-key-file key --out results": SERVED,
    "python benchmarks/compare_cpu.py TREE_A TREE_B --turns 20 --out FILE": "needs two checkouts and takes minutes",
    ".venv/bin/python -m tests.faults --verbose": "takes 20 minutes",
    'pytest -m "not full" -k NAME tests/unit/test_parity_families.py tests/unit/test_parallel_memory.py '
    "tests/unit/test_kernels_ops.py": THIS,
    "pytest tests/unit/test_spec.py": THIS,
    "make lint": "is part of `make test`",
    "make gpu-test": GPU,
    "make gpu-test-nvrar gpu-test-proxy": GPU,
    "TESTNET_REORDER=1 TESTNET_JITTER_US=20 python -m tests.gpu.proxied build/proxy python -m tests.gpu.nvrar_job "
    "stress 1+1+1 ops=2000": GPU,
    'python -m pytest tests/gpu/test_gpu_kernels.py -k "experts or routing"': GPU,
    "yalis bench kernels --device cuda --out results": GPU,
    "PYTHONPATH=. python benchmarks/tune_kernels.py --experts --rows 4,16,64": GPU,
    "PYTHONPATH=. python benchmarks/experts_on_cpu.py --out results -- --batch 1,8 --threads 2": "takes minutes",
    "make peers VLLM='vllm==0.24.0'": NETWORK,
    ". .venv/bin/activate": "this process is in such an environment",
    ".venv/bin/python -m pytest tests/unit/test_engine_llm.py -k cancel": THIS,
    ".venv/bin/python -m pytest tests/unit/test_nvrar_protocol.py -s -k "
    "'one and buffer and condition and not staging'": THIS,
    "git clone URL yalis && cd yalis": NETWORK,
    "git lfs pull": NETWORK,
    "pip install .": NETWORK,
    "pip install matplotlib": NETWORK,
    "pip wheel . -w wheels": NETWORK,
    "pip install --no-index --find-links wheels yalis": "needs the wheels of the command before it",
    "python3 -m venv --system-site-packages .venv": NETWORK,
    ".venv/bin/pip install . matplotlib": NETWORK,
    "pip install nvidia-nvshmem-cu13": NETWORK,
    "hf download HuggingFaceTB/SmolLM2-135M-Instruct": NETWORK,
    "yalis models --fetch smollm2-135m": "needs network access; `make fetch` runs it before the tests",
    'BESIDE=vllm REPEATS=1 make gpu-bench OUT=results STEPS="table job"': GPU,
    'BESIDE=vllm REPEATS=1 make gpu-bench OUT=results STEPS="table job startup"': GPU,
    "WORK=16x512x64 ALLREDUCE=nvrar benchmarks/breakdown_on_one_gpu.sh results tp1 tp2 tp4": GPU,
    "benchmarks/breakdown_on_one_gpu.sh results": GPU,
    "benchmarks/slices_on_one_gpu.sh results": GPU,
    "benchmarks/nvrar_on_one_gpu.sh results": GPU,
    "benchmarks/nvrar_on_one_gpu.sh results build bench": GPU,
    "benchmarks/nvrar_on_one_gpu.sh results plain": GPU,
    "benchmarks/nvrar_on_one_gpu.sh results decode": GPU,
    "yalis bench slice --model benchmarks/shapes/llama-3.1-405b.json --tp 8,16,32 --rank 0 --batch 1,16,64 "
    "--prompt-len 128 --workload 16x2480x33 --max-batch-tokens 16384 --dtype bfloat16 --out results": GPU,
    "yalis bench latency --model qwen3-30b-a3b --load random --routing uniform --batch 1,16,64 --peer vllm": GPU,
    'nsys profile -t cuda,nvtx yalis generate "1, 2, 3,"': GPU,
    'yalis generate "1, 2, 3," --tp 2 --allreduce nvrar': GPU,
    'torchrun --nproc-per-node 2 -m yalis generate "1, 2, 3," --tp 2': "tests/launchers/test_torchrun.py runs one",
    'mpirun -n 2 yalis generate "1, 2, 3," --tp 2': "tests/launchers/test_mpirun.py runs one",
    'srun -n 2 yalis generate "1, 2, 3," --tp 2': "tests/launchers/test_srun.py runs one",
    "sbatch slurm/serve.sh ~/yalis-url --model /path/to/Llama-3.1-70B --api-key-file ~/yalis-key": SLURM,
    'curl "$(cat ~/yalis-url)/v1/models" -H "Authorization: Bearer $(cat ~/yalis-key)"': SERVED,
    'sbatch slurm/generate-cpu.sh "The capital of France is" --max-tokens 64': "tests/launchers/test_slurm.py runs it",
    "bash jobs/submit.sh": "tests/launchers/test_bench_slurm.py runs it under Slurm",
    "yalis plan --study study": "takes 20 s; test_planner_search.py evaluates its statements",
    "yalis bench scaling --ranks 1,2,4 --schemes tp,pp --out cluster --gather": "needs the results of the Slurm jobs",
    "srun -N 4 --ntasks-per-node 4 yalis bench allreduce": "needs four nodes",
    "srun -N 2 --ntasks-per-node 4 --gpus-per-node 4 yalis doctor": "tests/multiprocess/test_doctor.py runs one",
    "sbatch slurm/accept.sh": GPU,
    "sbatch slurm/accept.sh --quick": "tests/multihost/test_accept.py runs it under Slurm",
    "yalis accept --quick --ranks 2": "takes a minute; tests/multiprocess/test_accept.py runs parts of it",
    "srun -N 2 --ntasks-per-node 4 yalis bench allreduce --tune": "needs two nodes",
    "yalis plan --machine acceptance/machine.json --nodes 1-4 --model MODEL": "needs the results of the Slurm job",
    "yalis bench scaling --ranks 1,2,4 --schemes tp,2x2,pp,hybrid --allreduce torch,mpi,hierarchical --workload 4x32x8 "
    "--device cpu --out two-cores --plot two-cores/scaling": "takes minutes; tests/multiprocess/test_bench_scaling.py",
    "yalis bench allreduce --hosts 4 --ranks-per-host 2 --delay 1ms": LAB,
    "yalis bench allreduce --hosts 4 --ranks-per-host 2 --delay 1ms --sizes 64K,128K,256K,1M,4M --repeats 18 "
    "--backends gloo,hierarchical,mpi": LAB,
    "yalis lab --hosts 2 --ranks-per-host 2 --delay 1ms --realtime -- yalis bench latency --tp 4 --allreduce "
    "hierarchical --batch 1,8 --prompt-len 16 --output-len 16 --repeats 2 --dtype float32": LAB,
}

IDS = {page: page.relative_to(ROOT).as_posix() for page in PAGES if steps(page)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("docs") / "model", max_position=512))


def bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def url(model: str) -> Iterator[str]:
    """Of a server that pages call smollm2-135m."""
    with LLM(model, threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="smollm2-135m") as server:
        yield server.url


def run_command(command: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern, smaller in SMALLER:
        command = re.sub(pattern, smaller, command)
    before, _, last = command.rpartition(" | ")
    if not last.startswith("yalis "):
        bash(command)
        return
    arguments = bash(f"printf '%s\\0' {last}").split("\0")[1:-1]
    if "--model" not in arguments and LOADS_A_MODEL.match(last):
        arguments += ["--model", model]
    typed = bash(before) if before else "hello\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    assert main(arguments) == 0, command


def call_server(step: Block, url: str) -> None:
    text = step.text.replace(URL, url)
    if step.language == "python":
        exec(compile(text, "page", "exec"), {"__name__": "__main__"})
    else:
        answer = json.loads(bash(text.replace("curl", "curl --fail-with-body --silent")))
        assert answer["choices"]


@pytest.mark.parametrize("page", IDS, ids=IDS.get)
def test_what_a_page_shows_runs(
    page: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in ("benchmarks", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    if any("--tune" in step.text for step in steps(page)):
        monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "cache"))  # the table must not reach the user's cache
    for step in steps(page):
        if URL in step.text and step.text not in NOT_RUN:
            call_server(step, request.getfixturevalue("url"))
        elif step.language == "python":
            code = compile(step.text.replace('"smollm2-135m"', repr(model)), str(page), "exec")
            exec(code, {"__name__": "__main__"})
        elif step.text not in NOT_RUN:
            run_command(step.text, model, monkeypatch)


def test_the_tables_have_nothing_that_the_pages_do_not() -> None:
    commands = {step.text for page in PAGES for step in steps(page) if step.language == "sh"}
    assert NOT_RUN.keys() - commands == set()
    run = commands - NOT_RUN.keys()
    assert [pattern for pattern, _ in SMALLER if not any(re.search(pattern, command) for command in run)] == []
    assert len(run) > 30

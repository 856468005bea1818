"""Time decode steps of OLMoE's widths with two layers against transformers on this CPU, in turns, with the floor.

PYTHONPATH=. python benchmarks/experts_on_cpu.py [--layers 2] [--dtype float32] [--out FOLDER] [-- OPTIONS]

Writes a checkpoint with random weights to a temporary folder (2 GB with two layers), so that both engines read the same
weights and their tokens can be compared, and calls `yalis bench latency` with it. Further OPTIONS are passed on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from yalis.cli.main import main as run_yalis


def main() -> int:
    """Run the benchmark and return the exit status of `yalis bench latency`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", default="results")
    parser.add_argument("options", nargs="*", default=["--batch", "1"], help="of yalis bench latency, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"olmoe-{given.layers}-layers"
        write_checkpoint(model, given.layers)
        sizes = ["--prompt-len", "64", "--output-len", "64", "--repeats", "5"]
        engine = ["--model", str(model), "--device", "cpu", "--dtype", given.dtype, "--peer", "transformers"]
        return run_yalis(["bench", "latency", *engine, *sizes, "--out", given.out, *given.options])


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write OLMoE-1B-7B with fewer layers and random weights in bfloat16."""
    config = transformers.OlmoeConfig(num_hidden_layers=layers, intermediate_size=1024)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

"""Profile a decode step on a GPU: the time of each kernel, and the gaps and overlap between them.

python benchmarks/profile_step.py [--model CONFIG] [--batch 1,16] [--prompt-len 128] [--eager] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from yalis import LLM
from yalis.engine.device import resolve_block_size
from yalis.study.kernels.step_times import StepTimes, measure_step

SHAPES = Path(__file__).parent / "shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPES / "llama-3.1-8b.json"))
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batch.split(",")]
    blocks = max(batches) * ((args.prompt_len + 128) // resolve_block_size(None, torch.device("cuda")) + 1)
    # Prefill all prompts in one step, so that no sequence decodes during prefill.
    tokens = max(2048, max(batches) * args.prompt_len)
    with LLM(
        args.model, load="random", max_num_seqs=max(batches), max_batch_tokens=tokens, kv_blocks=blocks,
        prefix_reuse=False, eager=args.eager,
    ) as llm:  # fmt: skip
        found = {batch: measure_step(llm, batch, args.prompt_len) for batch in batches}
    for batch, times in found.items():
        show(batch, times)
    if args.json is not None:
        args.json.write_text(json.dumps({batch: asdict(times) for batch, times in found.items()}, indent=2))


def show(batch: int, times: StepTimes) -> None:
    print_line(f"batch {batch}: {times.us:.0f} us a step, gaps {times.gaps:.0f} us, overlap {times.overlap:.0f} us")
    for kernel in times.kernels:
        if kernel.us >= 0.001 * times.us:
            print_line(f"{kernel.us:>9.1f} us{kernel.us / times.us:>7.1%}{kernel.count:>8.1f} x  {kernel.name[:90]}")


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()

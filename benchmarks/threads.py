"""Time prompts that several threads send to one LLM against one batch of the same prompts, in turns. Prints JSON.

python benchmarks/threads.py [--prompts 200] [--threads 8] [--per-call 25] [--max-tokens 32] [--repeats 5] [--out FILE]

Each thread calls `generate` with --per-call prompts until its share is done (default: the whole share in one call).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from yalis import LLM, SamplingParams
from yalis.machine import host, revision, versions

Prompts = list[list[int]]
Answers = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--per-call", type=int, help="prompts of one call (default: the thread's share)")
    parser.add_argument("--prompt-len", type=int, default=32, help="prompts have half to one and a half times as many")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    sampling = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    share = -(-args.prompts // args.threads)
    rng = random.Random(0)
    lengths = [rng.randint(args.prompt_len // 2, args.prompt_len * 3 // 2) for _ in range(args.prompts)]
    prompts = [[rng.randrange(10, 250) for _ in range(length)] for length in lengths]

    with LLM(args.model, prefix_reuse=False) as llm, ThreadPoolExecutor(args.threads) as pool:

        def generate(some: Prompts) -> Answers:
            return [output.token_ids for output in llm.generate(some, sampling, progress=False)]

        def generate_share(some: Prompts) -> Answers:
            size = args.per_call or share
            return [answer for start in range(0, len(some), size) for answer in generate(some[start : start + size])]

        def in_threads(some: Prompts) -> Answers:
            shares = [some[start : start + share] for start in range(0, len(some), share)]
            return [answer for answers in pool.map(generate_share, shares) for answer in answers]

        expected = generate(prompts)  # warm-up
        seconds: dict[str, list[float]] = {"batch": [], "threads": []}
        runs: list[tuple[str, Callable[[Prompts], Answers]]] = [("batch", generate), ("threads", in_threads)]
        for repeat in range(args.repeats):
            for name, run in runs if repeat % 2 == 0 else reversed(runs):
                begin = time.perf_counter()
                answers = run(prompts)
                seconds[name].append(round(time.perf_counter() - begin, 4))
                if answers != expected:
                    sys.exit(f"{name}, repeat {repeat}: other tokens than the warm-up")
    ratios = [threads / batch for batch, threads in zip(seconds["batch"], seconds["threads"], strict=True)]
    result = {
        "parameters": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "versions": versions(),
        "revision": revision(),
        "host": host(),
        "seconds": seconds,
        "median_seconds": {name: median(values) for name, values in seconds.items()},
        "ratio": {"median": round(median(ratios), 4), "min": round(min(ratios), 4), "max": round(max(ratios), 4)},
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()

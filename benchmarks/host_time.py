"""Host time of a step with 256 sequences, by part, without a device: what the interpreter does between two launches.

    python benchmarks/host_time.py [--sequences 256] [--requests 768] [--tokenizer MODEL] [--repeats 3] [--out FILE]

Runs the job of the `chat` workload, in which prompts arrive while others decode, through the real scheduler, wire
format, packer, input buffers, sampling batches and requests, with the settings of a GPU (two plans in flight, sampled
tokens stay on the device). Only the model is left out: tokens are random. Prints the median microseconds per step of
each part, for steps that only decode and for steps with prompts. `encode` and `decode` are spent with several ranks
only, `batch` only where the packed parameters are not enough. With a tokenizer, `deliver` detokenizes.

Also runs in older checkouts, where every step with random sampling builds a batch: PYTHONPATH=TREE python ...
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.tokenizer import Tokenizer, load_tokenizer
from yalis.engine.packing import Packer, StepKind
from yalis.engine.requests import PendingCompletion, PendingRequest, RequestGroup
from yalis.engine.step_layouts import DecodeLayout, StepLimits
from yalis.machine import host, revision
from yalis.sampling.batch import SamplingBatch, SamplingRow
from yalis.sampling.sampled_tokens import SampledTokens
from yalis.scheduling.plan import StepOutput, StepPlan
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.scheduling.wire import PlanDecoder, PlanEncoder
from yalis.types import SamplingParams
from yalis.workloads import ChatWorkload, draw_sizes, random_prompt

_BLOCK, _MAX_LEN, _VOCAB = 64, 4096, 32_000
_Result = TypeVar("_Result")
_PARTS = ("schedule", "encode", "decode", "pack", "fill", "batch", "result", "commit", "deliver")


class Clock:
    """Seconds of each part, of the step that is running."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    def run(self, part: str, function: Callable[[], _Result]) -> _Result:
        begin = time.perf_counter()
        result = function()
        self.parts[part] += time.perf_counter() - begin
        return result


class HostOnly:
    """The host side of an engine."""

    def __init__(self, sequences: int, tokenizer: Tokenizer | None) -> None:
        config = SchedulerConfig(
            max_num_seqs=sequences, max_batch_tokens=16_384, max_model_len=_MAX_LEN, block_size=_BLOCK,
            max_in_flight=2, feed_on_device=True, prefix_reuse=False,
        )  # fmt: skip
        max_blocks = _MAX_LEN // _BLOCK
        self.scheduler = Scheduler(config, sequences * max_blocks)
        self.encoder, self.decoder = PlanEncoder(), PlanDecoder()
        self.packer = Packer(sequences, max_blocks, _BLOCK, _MAX_LEN)
        self.layout = DecodeLayout(StepLimits(sequences, config.max_batch_tokens, _MAX_LEN, max_blocks))
        self.buffer = torch.zeros(self.layout.buffer_len(self.layout.sizes[-1]), dtype=torch.int64).numpy()
        self.last_tokens = torch.zeros(sequences + 1, dtype=torch.int64)
        self.group, self.tokenizer = RequestGroup(events=False), tokenizer
        self.completions: dict[int, PendingCompletion] = {}

    def submit(self, id: int, prompt: list[int], params: SamplingParams) -> None:
        request, sequence = PendingRequest(id, None, prompt, self.group), Request(id, prompt, params)
        self.completions[id] = request.add(sequence, params, self.tokenizer)
        self.group.add(request)
        self.scheduler.add(sequence)

    def launch(self, plan: StepPlan, clock: Clock) -> SampledTokens:
        """Do what the host does before the device runs, on the driver and on a follower."""
        message = clock.run("encode", lambda: self.encoder.encode(plan))
        clock.run("decode", lambda: self.decoder.decode(message))
        step = clock.run("pack", lambda: self.packer.pack(plan.sequences))
        size = self.layout.find_size(step)
        if step.kind is StepKind.DECODE and size is not None:
            clock.run("fill", lambda: self.layout.fill(self.buffer, size, step))
        else:
            clock.run("fill", lambda: step.to_batch(torch.device("cpu"), self.last_tokens, None))
        if not getattr(step, "picks", False):
            clock.run("batch", lambda: self.build_batch(plan))
        return SampledTokens(torch.randint(_VOCAB, (len(step.sampling_rows),)), None)

    def build_batch(self, plan: StepPlan) -> None:
        rows = [
            SamplingRow(step.params, step.params.seed or 0, step.start + step.num_tokens)
            for step in plan.sequences
            if step.samples
        ]
        if rows:
            SamplingBatch.build(rows, range(_VOCAB), _VOCAB, "cpu")

    def finish(self, plan: StepPlan, sampled: SampledTokens, clock: Clock) -> None:
        output = clock.run("result", lambda: make_output(plan, sampled))
        emitted = clock.run("commit", lambda: self.scheduler.commit(output))
        clock.run("deliver", lambda: self.deliver(emitted))

    def deliver(self, emitted: list[Any]) -> None:
        for item in emitted:
            completion = self.completions[item.request_id]
            completion.append(item)
            self.group.notify(completion)


def make_output(plan: StepPlan, sampled: SampledTokens) -> StepOutput:
    """Return the output of a step, as PendingStep.result() does."""
    tokens, _ = sampled.to_host()
    ids = [step.request_id for step in plan.sequences if step.samples]
    return StepOutput(plan.step_id, dict(zip(ids, tokens, strict=True)))


def run(sequences: int, requests: int, tokenizer: Tokenizer | None) -> dict[str, dict[str, list[float]]]:
    """Run the whole job once; returns the microseconds of every step by kind of step and part."""
    engine = HostOnly(sequences, tokenizer)
    draw = random.Random(0)
    for id, size in enumerate(draw_sizes((ChatWorkload(requests),), 0, None, 0.0)):
        params = SamplingParams(max_tokens=size.output_len, ignore_eos=True, temperature=0.8, top_p=0.95, seed=id)
        engine.submit(id, random_prompt(draw, size.prompt_len, _VOCAB), params)
    in_flight: deque[tuple[StepPlan, SampledTokens, Clock]] = deque()
    times: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in ("decode", "mixed")}
    while engine.scheduler.has_work:
        clock = Clock()
        while (plan := clock.run("schedule", engine.scheduler.schedule)) is not None:
            in_flight.append((plan, engine.launch(plan, clock), clock))
            clock = Clock()
        plan, sampled, clock = in_flight.popleft()
        engine.finish(plan, sampled, clock)
        if len(plan.sequences) > sequences // 2:  # leaves out the tail of the job
            kind = "decode" if plan.num_tokens == len(plan.sequences) else "mixed"
            for part in _PARTS:
                times[kind][part].append(1e6 * clock.parts.get(part, 0.0))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--tokenizer", help="a model, whose tokenizer detokenizes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    args = parser.parse_args()
    tokenizer = None
    if args.tokenizer is not None:
        with closing(open_checkpoint(args.tokenizer)) as checkpoint:
            tokenizer = load_tokenizer(checkpoint)
    runs = [run(args.sequences, args.requests, tokenizer) for _ in range(args.repeats)]
    result: dict[str, Any] = {}
    lines = [f"{'µs per step':<12}" + "".join(f"{part:>10}" for part in (*_PARTS, "total"))]
    for kind in ("decode", "mixed"):
        # The median of the steps, so that a busy machine counts less, and the best of the repeats.
        parts = {part: min(median(one[kind][part]) for one in runs) for part in _PARTS}
        result[kind] = {**parts, "total": sum(parts.values()), "steps": len(runs[0][kind]["pack"])}
        cells = "".join(f"{result[kind][part]:>10.0f}" for part in (*_PARTS, "total"))
        lines.append(f"{kind:<12}{cells}   {result[kind]['steps']:.0f} steps")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.out is not None:
        facts = {"host": host(), "revision": revision(), "sequences": args.sequences, "requests": args.requests}
        args.out.write_text(json.dumps({**facts, "us_per_step": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

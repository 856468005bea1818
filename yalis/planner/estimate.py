"""A fast estimate of a job's time from a few step times. It ranks many splits; the virtual clock replays the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yalis.parallel.plan import Split
from yalis.planner.job import Capacity, Job
from yalis.planner.step import StepShape, StepTime
from yalis.planner.step_time import StepTimeModel


@dataclass(frozen=True)
class Estimate:
    """Times of a job in seconds."""

    seconds: float  # from the first arrival to the last token
    latency: float  # of a request from its arrival to its last token, mean
    ttft: float  # mean time to first token
    itl: float  # mean inter-token latency
    breakdown: StepTime  # of one rank over the whole job, a mean over the pipeline stages


def estimate(job: Job, split: Split, capacity: Capacity, model: StepTimeModel) -> Estimate:
    """Return the estimate of a job whose requests all wait at the start, or arrive over a span of time.

    Every replica runs as many requests at a time as fit. They are prefilled together and then decode together.
    """
    requests = math.ceil(len(job.requests) / split.replicas)
    running = min(requests, job.config.max_num_seqs, capacity.sequences)
    rounds = requests / running
    prompt = job.prompt_tokens / len(job.requests)
    output = job.output_tokens / len(job.requests)
    prefill, prefill_busy = _prefill(job, split, model, running, prompt)
    micro_batches = min(job.config.micro_batches or split.stages, running)
    decode, decode_busy = _decode(split, model, running, micro_batches, prompt + output / 2)
    steps = max(output - 1, 0.0)
    last_arrival = max(request.arrival for request in job.requests)
    alone = prefill + steps * decode  # of requests that run together
    seconds = max(rounds * alone, last_arrival + alone)
    # The requests of round k wait for k - 1 rounds, unless they arrive while those run.
    latency = max(alone, (math.ceil(rounds) + 1) / 2 * alone - last_arrival / 2)
    busy = (prefill_busy + decode_busy.scaled(steps)).scaled(rounds)
    breakdown = busy + StepTime(idle=max(0.0, seconds - busy.total))
    return Estimate(seconds, latency, prefill, decode, breakdown)


def decode_shape(sequences: int, context: float) -> StepShape:
    """Return a step that decodes `sequences` sequences of `context` tokens each."""
    return StepShape(sequences, round(sequences * context), (), sequences)


def prefill_shapes(sequences: int, prompt: int, budget: int) -> list[StepShape]:
    """Return the steps that prefill equal prompts, each filled up to `budget` tokens as the scheduler does."""
    shapes: list[StepShape] = []
    chunks: list[tuple[int, int]] = []
    left, sampled = budget, 0
    for _ in range(sequences):
        start = 0
        while start < prompt:
            count = min(left, prompt - start)
            chunks.append((start, count))
            start, left = start + count, left - count
            sampled += start == prompt
            if not left:
                shapes.append(StepShape(0, 0, tuple(chunks), sampled))
                chunks, left, sampled = [], budget, 0
    if chunks:
        shapes.append(StepShape(0, 0, tuple(chunks), sampled))
    return shapes


def _decode(
    split: Split, model: StepTimeModel, running: int, micro_batches: int, context: float
) -> tuple[float, StepTime]:
    """Return the seconds in which every running sequence gets a token, and the busy time of a rank in them."""
    shape = decode_shape(math.ceil(running / micro_batches), context)
    times, host = model.stages(shape), model.host(shape)
    if split.stages == 1:
        return max(times[0].total, host), times[0]
    slowest = max(host, *(time.total for time in times))
    # A micro-batch returns once all stages have computed it; until then every stage computes the others.
    around = sum(time.total for time in times) + host + model.return_seconds(shape.decodes)
    cycle = max(micro_batches * slowest, around)
    return cycle, _mean(times).scaled(micro_batches)


def _prefill(job: Job, split: Split, model: StepTimeModel, running: int, prompt: float) -> tuple[float, StepTime]:
    tokens = running * prompt
    budget = job.config.max_batch_tokens
    if split.stages > 1:  # the scheduler divides the waiting tokens over the stages
        budget = max(1, min(budget, math.ceil(tokens / split.stages)))
    shapes = prefill_shapes(running, max(1, round(prompt)), budget)
    # Only few different steps are computed: of many, every n-th stands for its neighbours.
    stride = max(1, len(shapes) // 6)
    total, busy = 0.0, StepTime()
    for index in range(0, len(shapes), stride):
        weight = min(stride, len(shapes) - index)
        times, host = model.stages(shapes[index]), model.host(shapes[index])
        longest = max(host, *(time.total for time in times))
        if not index:
            total += sum(time.total for time in times) - max(time.total for time in times)  # fills the pipeline
        total += weight * longest
        busy = busy + _mean(times).scaled(weight)
    return total, busy


def _mean(times: Sequence[StepTime]) -> StepTime:
    total = StepTime()
    for time in times:
        total = total + time
    return total.scaled(1 / len(times))

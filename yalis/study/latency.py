"""The latency benchmark: time to first token and time of a decode step, beside the device's floor and beside peers.

Prompts are random token ids, fresh for every repeat so that no cache helps; decoding is greedy, past any end token.
Ours and every peer take turns within each repeat, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from yalis import __version__, result_rows, results
from yalis.checkpoint.resolve import locate, open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import resolve_device, resolve_dtype, with_block_size
from yalis.engine.interrupts import Stopped
from yalis.engine.llm import LLM
from yalis.engine.replica_ranks import split_of
from yalis.errors import YalisError, YalisFailure
from yalis.perfmodel.floors import ModelDims, Work, decode_work, floor_s, prefill_work
from yalis.spec import read_spec
from yalis.study import bandwidth
from yalis.study.peers.interleaving import take_turns
from yalis.study.peers.peer import Peer, PeerSetup, Timing
from yalis.study.peers.process import PEERS, start_peer
from yalis.study.spread import spread
from yalis.study.topology import has_floor, topology_of, unlike_peers
from yalis.study.workloads import Workload, draw_prompt
from yalis.types import SamplingParams


@dataclass(frozen=True)
class LatencyPlan:
    batch: tuple[int, ...] = (1, 8)
    prompt_len: int = 64
    output_len: int = 64
    warmup: int = 1
    repeats: int = 3
    peer: tuple[str, ...] = ()
    seed: int = 0
    workload: tuple[Workload, ...] = ()  # instead of batch, prompt_len and output_len

    def __post_init__(self) -> None:
        for name, low in (("prompt_len", 1), ("output_len", 2), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if not self.batch or min(self.batch) < 1:
            raise YalisError("batch needs sizes of at least 1; give for example --batch 1,8")
        for name in self.peer:
            if name not in PEERS.names():
                raise YalisError(f"unknown peer {name!r}; accepted: {', '.join(PEERS.names())}")

        if any(each.output_len < 2 for each in self.workload):
            raise YalisError("a workload of one output token has no decode step; give an output of at least 2 tokens")

    @property
    def cases(self) -> tuple[Workload, ...]:
        return self.workload or tuple(Workload(batch, self.prompt_len, self.output_len) for batch in self.batch)

    @property
    def longest(self) -> int:
        return max(case.longest for case in self.cases)

    def first(self, count: int) -> LatencyPlan:
        """The same of so many of the workloads."""
        if self.workload:
            return replace(self, workload=self.workload[:count])
        return replace(self, batch=self.batch[:count])


class Ours:
    """This engine, driven step by step."""

    name = "yalis"
    version = __version__

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
        stats = self._llm.stats
        preempted = stats.preemptions
        start = time.perf_counter()
        ids = [self._llm.submit(prompt, sampling) for prompt in prompts]
        done: dict[int, list[int]] = {}
        stamps: list[float] = []
        counts: list[int] = []  # tokens that each step gave
        host: list[float] = []  # seconds that each took of the host
        while len(done) < len(ids):
            before, spent = stats.output_tokens, self._host_seconds()
            done.update((id, output.token_ids) for id, output in self._llm.poll())
            stamps.append(time.perf_counter() - start)
            counts.append(stats.output_tokens - before)
            host.append(self._host_seconds() - spent)
        # The last step gives the last sequence its last token, so from its first token on no prompt is computed;
        # until the first sequence ends, each of those steps gives a token to every sequence.
        first = len(stamps) - output_len
        full = [i for i in range(first + 1, len(stamps)) if counts[i] == len(ids)]
        steps = [stamps[i] - stamps[i - 1] for i in full]
        if stats.preemptions > preempted or not steps:
            raise YalisFailure(
                f"a batch of {len(ids)} never decoded all at once, so its step has no time; "
                "give a larger --kv-memory, --kv-blocks, --max-batch-tokens or --output-len, or a smaller --batch"
            )
        return Timing(stamps[first], steps, stamps[-1], [done[id] for id in ids], median(host[i] for i in full))

    def _host_seconds(self) -> float:
        """Planning and launching steps; on a CPU planning alone, since the host computes there."""
        stats = self._llm.stats
        return stats.schedule_seconds + (stats.launch_seconds if self._llm.device.type == "cuda" else 0.0)


def measure(
    config: EngineConfig, plan: LatencyPlan, command: str, report: Callable[[str], None] = lambda text: None
) -> results.Result:
    """Run the whole benchmark; `report` hears what it is doing. After a Ctrl-C the workloads that are done are the
    result, which Stopped carries."""
    if config.pp > 1 or config.dp > 1:
        raise YalisError("bench latency times one step after the other; leave --pp and --dp out, or try bench pipeline")
    config = fit(config, plan)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        _check_length(plan, config.max_model_len or read_spec(checkpoint.config, checkpoint.label).max_position)
    report("loading the model")
    begin = time.perf_counter()
    with LLM(**asdict(config)) as llm:
        load_seconds = time.perf_counter() - begin
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, llm.spec.dtype, device)
        _check_length(plan, llm.max_model_len)  # a KV cache the user chose may hold less
        report("measuring the device")
        before = bandwidth.measure(device, dtype)
        setup = PeerSetup(
            locate(config.model, config.load == "auto"), config.load == "random", dtype, device,
            plan.longest, max(case.batch for case in plan.cases), config.max_batch_tokens, len(plan.peer),
        )  # fmt: skip
        others = []
        for name in plan.peer:
            report(f"loading {name}")
            others.append((name, start_peer(name, setup)))
        engines: list[tuple[str, Peer | str]] = [("yalis", Ours(llm)), *others]
        taken: list[list[list[Timing] | str]] = []
        rates, interrupt = before, None
        try:
            for case in plan.cases:
                taken.append(_take_turns(case, plan, engines, llm.spec.vocab_size, report))
            report("measuring the device again")
            rates = before.best(bandwidth.measure(device, dtype))  # what it could do at its best in this run
        except KeyboardInterrupt as stop:
            if not taken:
                raise
            interrupt = stop
        share, plan = f"{len(taken)} of {len(plan.cases)} workloads", plan.first(len(taken))
        dims = ModelDims.of(llm.spec, dtype.itemsize, dtype.itemsize)
        rows = []
        for case, timings in zip(plan.cases, taken, strict=True):
            floors = find_floors(dims, case, rates) if has_floor(config, device) else None
            rows += _tabulate(case, engines, timings, floors, split_of(config).size, config.load != "random")
        instead = ("batch", "prompt_len", "output_len") if plan.workload else ("workload",)
        parameters = {
            **{name: value for name, value in asdict(plan).items() if name not in instead},
            "engine": asdict(config),
            "load_seconds": load_seconds,
            "graph_bytes": llm.stats.graph_bytes,
            "dtype": str(dtype).removeprefix("torch."),
            **asdict(rates),
        }
        devices = [bandwidth.describe(device)]
        notes = unlike_peers(config, plan.peer) + ([] if interrupt is None else [f"stopped after {share}"])
        result = results.new("latency", parameters, rows, command, devices, notes, topology_of(llm._world))
        if interrupt is not None:
            raise Stopped(f"{share} done", result) from interrupt
        return result


def fit(config: EngineConfig, plan: LatencyPlan) -> EngineConfig:
    """An engine that runs the largest batch at once and, unless told otherwise, leaves the other memory to peers."""
    config, size = with_block_size(config)
    most = max(case.batch for case in plan.cases)
    blocks = config.kv_blocks
    if blocks is None and config.kv_memory is None:
        # A sequence starts only where every older one has a block to spare.
        needed = max(case.batch * (-(-case.longest // size) + 1) for case in plan.cases)
        blocks = max(needed, -(-(config.max_model_len or 0) // size))
    return replace(config, max_num_seqs=max(config.max_num_seqs, most), kv_blocks=blocks)


def _check_length(plan: LatencyPlan, limit: int) -> None:
    if plan.longest > limit:
        raise YalisError(f"prompt_len + output_len is {plan.longest}, but the context holds {limit}; give less")


@dataclass(frozen=True)
class Floors:
    """Seconds below which nothing can go on this device."""

    prefill: float
    decode: float  # a step, at the middle of the output

    def over(self, devices: int) -> Floors:
        """Where so many like it have a share each."""
        return Floors(self.prefill / devices, self.decode / devices)


def find_floors(dims: ModelDims, case: Workload, rates: bandwidth.DeviceRates) -> Floors:
    def floor(work: Work) -> float:
        return floor_s(work.bytes, work.flops, rates.read_bytes_per_s, rates.matmul_flops_per_s)

    return Floors(
        prefill=floor(prefill_work(dims, [case.prompt_len] * case.batch)),
        decode=floor(decode_work(dims, [case.prompt_len + case.output_len / 2] * case.batch)),
    )


def _take_turns(
    case: Workload,
    plan: LatencyPlan,
    engines: list[tuple[str, Peer | str]],
    vocab_size: int,
    report: Callable[[str], None],
) -> list[list[Timing] | str]:
    """The timings of each engine, or why it has none."""
    batches = []
    for turn in range(plan.warmup + plan.repeats):
        noise = random.Random(f"{plan.seed}/{case}/{turn}")
        batches.append([draw_prompt(noise, case.prompt_len, vocab_size) for _ in range(case.batch)])

    def run(engine: Peer, prompts: list[list[int]], _: object) -> Timing:
        timing = engine.run(prompts, case.output_len)
        _check_answers(case, timing.tokens)
        return timing

    return take_turns(engines, batches, plan.warmup, run, lambda text: report(f"{case}: {text}"))


def _check_answers(case: Workload, answers: list[list[int]]) -> None:
    """An engine that gave something else than was asked for was not measured at it."""
    if [len(tokens) for tokens in answers] != [case.output_len] * case.batch:
        given = sum(map(len, answers))
        raise YalisFailure(
            f"{case.batch} requests for {case.output_len} tokens gave {given} in {len(answers)} answers, so nothing "
            "was measured"
        )


def _tabulate(
    case: Workload,
    engines: list[tuple[str, Peer | str]],
    taken: list[list[Timing] | str],
    floors: Floors | None,
    ranks: int,
    comparable: bool,
) -> list[dict[str, Any]]:
    """One row for each engine, ours first; `ranks` are ours. `comparable`: whether all have the same weights."""
    ours = taken[0]
    assert not isinstance(ours, str)
    our_step = median(step for timing in ours for step in timing.steps)
    rows = []
    for (name, engine), timings in zip(engines, taken, strict=True):
        row: dict[str, Any] = dict.fromkeys(result_rows.columns("latency"))
        row.update(engine=name, version="" if isinstance(engine, str) else engine.version)
        row.update(batch=case.batch, prompt_len=case.prompt_len, output_len=case.output_len)
        if isinstance(timings, str):
            row["status"] = timings
        else:
            steps = [step for timing in timings for step in timing.steps]
            firsts = [timing.first_token for timing in timings]
            totals = [timing.total for timing in timings]
            first, step, seconds = median(firsts), median(steps), median(totals)
            low, high = spread(steps)
            first_low, first_high = spread(firsts)
            seconds_low, seconds_high = spread(totals)
            row.update(
                status="ok",
                first_token_ms=1e3 * first,
                first_token_ms_low=1e3 * first_low,
                first_token_ms_high=1e3 * first_high,
                prefill_tokens_per_s=case.batch * case.prompt_len / first,
                decode_ms=1e3 * step,
                decode_ms_low=1e3 * low,
                decode_ms_high=1e3 * high,
                seconds=seconds,
                seconds_low=seconds_low,
                seconds_high=seconds_high,
                tokens_per_s=case.batch * case.output_len / seconds,
                host_ms=_host_ms(timings),
                ratio=step / our_step,
                same_tokens=_agreement(ours, timings) if comparable and timings is not ours else None,
            )
            if floors is not None:
                own = floors.over(ranks) if timings is ours else floors
                row.update(
                    prefill_floor_ms=1e3 * own.prefill,
                    floor_ms=1e3 * own.decode,
                    share_of_floor=own.decode / step,
                )
        rows.append(row)
    return rows


def _host_ms(timings: list[Timing]) -> float | None:
    known = [timing.host for timing in timings if timing.host is not None]
    return 1e3 * median(known) if known else None


def _agreement(ours: list[Timing], theirs: list[Timing]) -> float:
    """The share of sequences, over all repeats, whose tokens are the same to the last."""
    pairs = [
        (a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine.tokens, other.tokens, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)

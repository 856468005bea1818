"""A slice has the weights, partial sums and collectives of the same rank of a real job."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import CASES
from tests.ranks import Board, Memory, run_ranks
from yalis import LLM, YalisError
from yalis.checkpoint.random import RandomCheckpoint
from yalis.comm.base import BACKENDS, Communicator, SingleRank
from yalis.comm.null import NullBackend, NullGroup
from yalis.config import EngineConfig
from yalis.engine.engine import Engine
from yalis.engine.runner import Runner
from yalis.engine.slice_rank import SliceRank
from yalis.parallel.memory import rank_memory
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.planner.collectives import StageGroups, collectives
from yalis.scheduling.plan import SequenceStep, StepPlan
from yalis.spec import read_spec
from yalis.types import SamplingParams

#: No number of ranks here divides the heads, the MLP width and the vocabulary; 4 and 5 rows share KV heads.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 251, "max_position_embeddings": 256, "rope_theta": 1e4, "hidden_size": 64, "intermediate_size": 83,
    "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
SPEC = read_spec(CONFIG, "tiny")
CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_tokens=8, ignore_eos=True, seed=0)


def engine_config(split: Split) -> EngineConfig:
    return EngineConfig(
        "tiny", load="random", device="cpu", dtype="float32", kv_blocks=32, max_num_seqs=4, max_model_len=128,
        tp=(split.rows, split.cols), pp=split.stages,
    )  # fmt: skip


def step(start: int, slot: int, tokens: Sequence[int]) -> SequenceStep:
    return SequenceStep(slot, slot, start, tuple(tokens), (slot,), True, start, False, SAMPLING, None)


#: A prefill of two prompts, then two decode steps with tokens of the first and of the last shard.
PLANS = [
    StepPlan(0, (step(0, 0, (3, 250, 7, 130)), step(0, 1, (90, 91)))),
    StepPlan(1, (step(4, 0, (2,)), step(2, 1, (249,)))),
    StepPlan(2, (step(5, 0, (200,)), step(3, 1, (5,)))),
]


class Recorded(Memory):
    """A real communicator between threads that keeps the input and the output of every collective."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(board, rank)
        self.seen: list[tuple[str, Tensor, Tensor]] = []

    def _keep(self, name: str, x: Tensor, call: Callable[[], Tensor]) -> Tensor:
        before = x.clone()
        out = call()
        self.seen.append((name, before, out.clone()))
        return out

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._keep("all_reduce", x, lambda: super(Recorded, self).all_reduce(x, out))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._keep("all_gather", x, lambda: super(Recorded, self).all_gather(x, dim))


class ThreadBackend:
    """Creates groups between threads, on boards that the ranks of a job share."""

    def __init__(self, rank: int, boards: dict[tuple[str, tuple[int, ...]], Board], lock: threading.Lock) -> None:
        self.rank, self.boards, self.lock, self.groups = rank, boards, lock, list[Recorded]()

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        with self.lock:
            board = self.boards.setdefault((name, tuple(ranks)), Board(len(ranks), 30))
        self.groups.append(Recorded(board, list(ranks).index(self.rank)))
        return self.groups[-1]


def run_job(split: Split) -> list[tuple[Runner, ThreadBackend, list[dict[int, int]]]]:
    """Run PLANS on all ranks of a real job; returns each rank's runner, communicators and sampled tokens."""
    boards: dict[tuple[str, tuple[int, ...]], Board] = {}
    lock = threading.Lock()

    def run(rank: int, _: Memory) -> tuple[Runner, ThreadBackend, list[dict[int, int]]]:
        backend: Any = ThreadBackend(rank, boards, lock)
        grid, stage = Grid.open(split, rank, backend), Stage.open(split, rank, backend)
        checkpoint = RandomCheckpoint(CONFIG, 0, "tiny")
        runner = Runner(engine_config(split), SPEC, checkpoint, frozenset(), CPU, grid, stage)
        pending = [runner.launch(plan) for plan in PLANS]
        return runner, backend, [dict(one.result().tokens) for one in pending if one is not None]

    return run_ranks(split.size, run)


def open_slice(split: Split, rank: int) -> SliceRank:
    return SliceRank(rank, engine_config(split), SPEC, RandomCheckpoint(CONFIG, 0, "tiny"))


def null_groups(part: SliceRank) -> list[NullGroup]:
    assert isinstance(part._comm, NullBackend)
    return part._comm.groups


def replay(group: NullGroup, seen: list[tuple[str, Tensor, Tensor]]) -> None:
    """Let a group of the slice check each input against the real rank's, and return what the real collective did."""
    calls = iter(seen)

    def replayed(name: str, in_place: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, *_: Any) -> Tensor:
            recorded, before, after = next(calls)
            assert recorded == name
            torch.testing.assert_close(x, before, rtol=0, atol=0)
            return x.copy_(after) if in_place else after.clone()

        return call

    group.__dict__.update(all_reduce=replayed("all_reduce", True), all_gather=replayed("all_gather", False))


def keep_inputs(group: Communicator) -> list[Tensor]:
    """Return the list to which the group appends the input of every all-reduce from now on."""
    inputs: list[Tensor] = []
    all_reduce = group.all_reduce

    def keep(x: Tensor, out: Tensor | None = None) -> Tensor:
        inputs.append(x.clone())
        return all_reduce(x, out)

    group.__dict__["all_reduce"] = keep
    return inputs


@pytest.mark.parametrize("split", [Split(2), Split(3), Split(5), Split(2, 2)], ids=str)
def test_a_slice_computes_what_the_real_rank_computes(split: Split) -> None:
    for rank, (real, backend, tokens) in enumerate(run_job(split)):
        part = open_slice(split, rank)
        parameters = dict(part.runner.model.named_parameters())
        for name, weight in real.model.named_parameters():
            assert torch.equal(parameters.pop(name), weight), name
        assert not parameters
        memory = rank_memory(SPEC, split, rank, 4, 16)
        assert part.runner.weight_bytes == real.weight_bytes == memory.weight_bytes
        assert part.runner.pool.nbytes == real.pool.nbytes
        for group, recorded in zip(null_groups(part), backend.groups, strict=True):
            assert (group.rank, group.size) == (recorded.rank, recorded.size)
            replay(group, recorded.seen)
        pending = [part.launch(plan) for plan in PLANS]
        assert [dict(one.result().tokens) for one in pending] == tokens


@pytest.mark.parametrize("split", [Split(2), Split(3), Split(2, 2)], ids=str)
def test_the_collectives_of_a_slice(split: Split) -> None:
    """Before its first all-reduce a slice has the real rank's values, and it calls the same collectives."""
    for rank, (_, backend, _) in enumerate(run_job(split)):
        part = open_slice(split, rank)
        inputs = keep_inputs(part.runner.grid.tp_group)
        for plan in PLANS:
            part.launch(plan).result()
        real_tp = next(group for group in backend.groups if group.size == split.per_stage)
        first = next(before for name, before, _ in real_tp.seen if name == "all_reduce")
        assert torch.equal(inputs[0], first)
        for group, recorded in zip(null_groups(part), backend.groups, strict=True):
            assert group.calls == Counter(name for name, _ in recorded.calls)
        if split.cols == 1:  # embedding, and attention and MLP of each layer
            assert part.count_all_reduces() == (1 + 2 * SPEC.num_layers, (1 + 2 * SPEC.num_layers) * 64 * 4)


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "cohere2", "starcoder2"])
def test_the_planner_knows_the_all_reduces_of_a_model(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    config = case.build(0).config.to_dict()
    spec = read_spec(config)
    for split in (Split(2), Split(2, 2)):
        part = SliceRank(0, engine_config(split), spec, RandomCheckpoint(config, 0, name))
        planned = list(collectives(spec, split, StageGroups.of(split, 4, 0), 0, 4, tokens=1, sampled=1))
        reduces = [one for one in planned if one.operation == "all_reduce"]
        total = sum(one.count for one in reduces), sum(one.count * one.bytes for one in reduces)
        assert part.count_all_reduces() == total, split


@pytest.mark.parametrize("rank", range(6))
def test_every_stage_of_a_pipeline_runs_alone(rank: int) -> None:
    split = Split(2, stages=3)
    part = open_slice(split, rank)
    runner = part.runner
    assert (runner.stage.index, len(runner.model.layers)) == (rank // 2, 1)
    engine = Engine(engine_config(Split(2)), SPEC, part, frozenset())
    prompt = list(runner.vocabulary)[:5]
    ids = [engine.add(prompt, SAMPLING).id for _ in range(3)]
    tokens: dict[int, list[int]] = {id: [] for id in ids}
    while engine.has_work:
        for item in engine.step():
            assert item.token is not None
            tokens[item.request_id].append(item.token)
    steps = engine.stats.steps
    assert [len(one) for one in tokens.values()] == [8, 8, 8]
    assert all(token in runner.vocabulary for one in tokens.values() for token in one)
    calls = Counter[str]()
    for group in null_groups(part):
        calls += group.calls
    assert calls["send"] == (0 if runner.stage.last else steps)
    assert calls["recv"] == (0 if runner.stage.first else steps)
    assert calls["all_reduce"] == steps * (3 if runner.stage.first else 2)
    assert part.count_all_reduces()[0] == (3 if runner.stage.first else 2)
    engine.close()


def test_operations_return_at_once_with_the_shapes_of_the_real_ones() -> None:
    group = NullGroup(1, 3, capturable=True)
    x = torch.arange(6.0).view(2, 3)
    assert group.all_reduce(x) is x
    out = torch.empty_like(x)
    assert group.all_reduce(x, out) is out
    assert torch.equal(out, x)
    assert torch.equal(group.all_gather(x), torch.cat([x] * 3, -1))
    assert torch.equal(group.all_gather(x, 0), torch.cat([x] * 3, 0))
    assert group.broadcast(x, 2) is x
    group.send(x, 0)
    group.barrier()
    received = group.recv(torch.full((4, 3), torch.nan), 0)
    assert received.shape == (4, 3)
    assert received.isfinite().all()
    assert group.reduced_bytes == 2 * x.nbytes
    assert sum(group.calls.values()) == 8


def test_users_cannot_select_it() -> None:
    assert NullBackend.name not in BACKENDS.names()
    with pytest.raises(YalisError, match="unknown communication backend 'null'; accepted: torch"):
        LLM("tiny", allreduce="null", tp=2)

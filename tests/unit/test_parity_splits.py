"""Ranks as threads: every split of a brief case has transformers' tokens and logits.

tests/multiprocess/test_splits.py runs the other cases, and a few of these, with ranks as processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import Case, Reference, make_prompts, make_reference
from tests.multiprocess.splits import WIDE
from tests.ranks import Board, Memory, run_ranks
from tests.unit.test_engine_slice_rank import ThreadBackend
from yalis import SamplingParams
from yalis.checkpoint.safetensors import SafetensorsCheckpoint
from yalis.config import EngineConfig
from yalis.engine.runner import PendingStep, Runner
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.sampling.batch import SamplingRow
from yalis.sampling.sampled_tokens import SampledTokens
from yalis.scheduling.plan import SequenceStep, StepPlan
from yalis.spec import ModelSpec, read_spec

STEPS, BLOCK_SIZE = 6, 8
SPLITS = [
    Split(3), Split(2, 2), Split(1, 2), Split(2, stages=2), Split(8), Split(4, 2), Split(5), Split(1, 4),
    Split(2, 2, stages=2), Split(stages=5),
]  # fmt: skip
#: `make test` runs one case of each family under one of the first four splits. The others have no operation that these
#: lack.
IN_CI = 4
BRIEF = [case for case in WIDE if case.brief and "num_experts_per_tok" not in case.options]
TRIALS = [
    pytest.param(
        case, split, id=f"{case.name}-{split}", marks=[pytest.mark.full] * ("tied" in case.name or number % IN_CI != at)
    )
    for number, case in enumerate(BRIEF)
    for at, split in enumerate(SPLITS)
]


class KeepingRunner(Runner):
    """Keeps this rank's shard of the logits of every step."""

    def _run_sampler(self, logits: Tensor, rows: list[SamplingRow]) -> SampledTokens:
        self.logits.append(logits.clone())
        return super()._run_sampler(logits, rows)

    logits: list[Tensor]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("wide"), dict[str, Reference]()

    def find(case: Case) -> Reference:
        if case.name not in made:
            made[case.name] = make_reference(case, folder, 4, make_prompts(4, (27, 5), shared=0), STEPS)
        return made[case.name]

    return find


def plans(ref: Reference, spec: ModelSpec) -> Iterator[StepPlan]:
    """Yield the prompts in one step, then transformers' tokens one by one. No sequence grows beyond switch_at."""
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, seed=0)
    for number in range(STEPS):
        steps = []
        for slot, (prompt, tokens) in enumerate(zip(ref.prompts, ref.tokens, strict=True)):
            start = len(prompt) + number - 1 if number else 0
            given = (tokens[number - 1],) if number else tuple(prompt)
            blocks = tuple(range(8 * slot, 8 * slot + 8))
            long_rope = len(prompt) > (spec.rope.switch_at or spec.max_position)
            steps.append(SequenceStep(slot, slot, start, given, blocks, True, number, long_rope, params, None))
        yield StepPlan(number, tuple(steps))


@pytest.mark.parametrize(("case", "split"), TRIALS)
def test_a_split_has_the_tokens_of_transformers(reference: Any, case: Case, split: Split) -> None:
    ref: Reference = reference(case)
    boards: dict[tuple[str, tuple[int, ...]], Board] = {}
    lock = threading.Lock()
    config = EngineConfig(
        str(ref.path), device="cpu", dtype="float32", kv_blocks=16, block_size=BLOCK_SIZE, max_num_seqs=2,
        max_model_len=64, tp=(split.rows, split.cols), pp=split.stages,
    )  # fmt: skip

    def run(rank: int, _: Memory) -> tuple[list[list[int]], list[Tensor]]:
        backend: Any = ThreadBackend(rank, boards, lock)
        grid, stage = Grid.open(split, rank, backend), Stage.open(split, rank, backend)
        checkpoint = SafetensorsCheckpoint(Path(ref.path))
        spec = read_spec(checkpoint.config)
        runner = KeepingRunner(config, spec, checkpoint, frozenset(), torch.device("cpu"), grid, stage)
        runner.logits = []
        pending: list[PendingStep | None] = [runner.launch(plan) for plan in plans(ref, spec)]
        tokens = [one.result().tokens for one in pending if one is not None]
        return [[step[slot] for step in tokens] for slot in range(2)], runner.logits

    ranks = run_ranks(split.size, run)[-split.per_stage :]
    for tokens, _ in ranks:
        assert tokens == ref.tokens
    for number, shards in enumerate(zip(*(logits for _, logits in ranks), strict=True)):
        found = torch.cat(shards, dim=1)
        expected = torch.stack([logits[number] for logits in ref.logits])
        assert (found - expected).abs().max() < 1e-4

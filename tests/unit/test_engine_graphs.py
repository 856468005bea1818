"""What CUDA graphs rely on, on the CPU: a recorded step of fixed size, filled up, fed and read as on a GPU.

Only the recording differs: here it is the function itself, run again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import numpy as np
import pytest
import torch

from tests.families import CASES, make_prompts, make_reference
from yalis import LLM, SamplingParams
from yalis.engine import engine, graphs, oom
from yalis.engine.graphs import PROMPTS, CudaGraphs, prompts_for, sizes_for
from yalis.engine.packing import COLUMNS, PROMPT_COLUMNS, Packer, prompt_room, split_prompt
from yalis.errors import YalisError, YalisFailure
from yalis.scheduling.plan import LAST_SAMPLED, SequenceStep
from yalis.scheduling.scheduler import SchedulerConfig

pytest.importorskip("triton")
STEPS = 6


class Again:
    """A recording that runs the function anew and leaves the result where the first run did."""

    def __init__(self, function, pool):
        self._function, self.result = function, function()

    def replay(self):
        for kept, new in zip(self.result, self._function(), strict=True):
            if kept is not None:
                kept.copy_(new)


class Graphs(CudaGraphs):
    recording = Again

    def run(self, step, hidden=None):
        done = super().run(step, hidden)
        # On a GPU the copy to the host stands in the stream before the next step.
        return done if done.tokens is None else replace(done, tokens=done.tokens.clone())


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    case = next(case for case in CASES if case.name == "qwen3-gqa4")
    return make_reference(case, tmp_path_factory.mktemp("graphs"), 1, make_prompts(1, (9, 1, 12), shared=0), STEPS)


def open_llm(ref, monkeypatch, **fields) -> LLM:
    """As on a GPU: plans overlap, sampled tokens are fed on the device, decode steps are replayed."""

    def ahead(**settings):
        return SchedulerConfig(**{**settings, "max_in_flight": 2, "feed_on_device": True})

    monkeypatch.setattr(engine, "SchedulerConfig", ahead)
    llm = LLM(
        str(ref.path),
        device="cpu",
        attention="triton",
        kv_blocks=32,
        max_num_seqs=4,
        max_model_len=32,
        **{"max_batch_tokens": 22, **fields},
    )
    runner = llm._engine.runner
    with torch.inference_mode():
        forward, last = runner.graphs._forward, runner.last_tokens
        most = 32 // runner.block_size
        runner.graphs = Graphs(llm.config, forward, last, 32, most, True, lambda rows: None, dependent=False)
        runner._warm_up(llm.config, 32)
        before = runner.pool._kv.clone()
        assert before[:, :, 0].count_nonzero(), "warming up ran nothing"
        runner.graphs.record(runner._block_bytes)
        assert torch.equal(runner.pool._kv, before), "recording wrote into the cache"
    return llm


def plain(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **fields})


def test_replayed_steps_give_the_references_tokens(ref, monkeypatch):
    with open_llm(ref, monkeypatch) as llm, torch.inference_mode():
        recorded = llm._engine.runner.graphs
        assert recorded.sizes == [1, 2, 4]
        # The second ends early: steps of three sequences, filled up to four, and of two.
        lengths = [STEPS, 2, STEPS]
        outputs = llm.generate(ref.prompts, [plain(max_tokens=n) for n in lengths])
        for output, wanted, length in zip(outputs, ref.tokens, lengths, strict=True):
            assert output.token_ids == wanted[:length]
        assert recorded.replays >= STEPS - 2
        assert llm._engine.scheduler.counters.fed_tokens > 0


def test_rows_that_ask_for_more_stand_beside_greedy_ones(ref, monkeypatch):
    """A step in which one row is drawn, penalised or reported leaves the graph's own choice unused."""
    asked = [plain(), plain(temperature=0.9, seed=3, logprobs=1), plain(repetition_penalty=1.3)]
    with open_llm(ref, monkeypatch) as llm, torch.inference_mode():
        together = llm.generate(ref.prompts, asked)
        assert llm._engine.runner.graphs.replays > 0
    with LLM(str(ref.path), device="cpu", attention="sdpa", eager=True) as llm:
        wanted = llm.generate(ref.prompts, asked)
        assert llm._engine.runner.graphs.replays == 0
    assert [output.token_ids for output in together] == [output.token_ids for output in wanted]
    assert together[0].token_ids == ref.tokens[0]
    for ours, theirs in zip(together[1].logprobs, wanted[1].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_short_prompts_that_come_alone_are_replayed(ref, monkeypatch):
    """Filled up to sixteen tokens, from the start and behind what the cache has of them; a long one is not."""
    with open_llm(ref, monkeypatch, block_size=4) as llm, torch.inference_mode():
        runner = llm._engine.runner
        recorded = runner.graphs
        assert recorded.prompts == [16]
        ran = []
        monkeypatch.setattr(
            runner.packer, "pack", lambda steps: ran.append(Packer.pack(runner.packer, steps)) or ran[-1]
        )
        for prompt, wanted in [*zip(ref.prompts, ref.tokens, strict=True)] * 2:
            before = recorded.replays
            assert llm.generate(prompt, plain())[0].token_ids == wanted
            assert recorded.replays - before == len(ran)  # every step
            found = ran[0].positions[0]
            assert ran[0].tokens.tolist() == prompt[found:]
            ran.clear()
        assert found == 8  # the first two blocks of twelve tokens
        long = [*reversed(ref.prompts[0] + ref.prompts[2])]  # of which the cache has nothing
        before = recorded.replays
        (answer,) = llm.generate(long, plain())
        assert recorded.replays - before == STEPS - 1
    with LLM(str(ref.path), device="cpu", attention="sdpa", eager=True) as llm:
        assert llm.generate(long, plain())[0].token_ids == answer.token_ids


def test_what_a_prompt_does_not_see_does_not_reach_it(ref, monkeypatch):
    """Neither what fills it up, nor what others left behind it in its blocks and in block 0."""
    with open_llm(ref, monkeypatch, block_size=4) as llm, torch.inference_mode():
        llm._engine.runner.pool._kv.fill_(torch.inf)
        for prompt, wanted in zip(ref.prompts, ref.tokens, strict=True):
            assert llm.generate(prompt, plain())[0].token_ids == wanted
        assert llm._engine.runner.graphs.replays == 3 * STEPS


def test_prompts_are_recorded_for_what_may_come():
    assert prompts_for(10**5, 8192) == list(PROMPTS)
    assert prompts_for(10**5, 100) == [16, 32, 64]
    assert prompts_for(64, 8192) == [16, 32, 64]
    assert prompts_for(65, 8192) == [16, 32, 64, 128]
    assert prompts_for(9, 8192) == [16]
    assert prompts_for(9, 8) == []


@pytest.mark.parametrize("block_size", [4, 32])
def test_no_recorded_step_reads_past_its_block_table(ref, monkeypatch, block_size):
    monkeypatch.setattr(graphs, "PROMPTS", (16, 64))  # the second is more than a context of 32 has room for
    with open_llm(ref, monkeypatch, block_size=block_size, max_batch_tokens=64) as llm, torch.inference_mode():
        recorded = llm._engine.runner.graphs
        assert (64, 1) in recorded._recorded
        for size in recorded._recorded:
            recorded._inbox.packed.fill_(10**6)
            recorded._record(size)
            batch = recorded._recorded[size].batch
            assert batch.context_len.max() <= batch.block_tables.shape[1] * block_size, size
            assert batch.block_tables.max() < llm._engine.runner.num_blocks


def test_what_is_replayed(ref, monkeypatch):
    packer = Packer(max_num_seqs=2, most_blocks=8, block_size=4, rope_length=100)
    with open_llm(ref, monkeypatch, block_size=4) as llm:
        recorded = llm._engine.runner.graphs

        def size_for(start: int, count: int, samples: bool = True, first: int = 5) -> tuple[int, int] | None:
            blocks = tuple(range(-(-(start + count) // 4)))
            step = replace(make_sequence(1, start, (first,) * count, blocks), samples=samples)
            return recorded._size_for(packer.pack([step]))

        assert size_for(0, 2) == size_for(16, 16) == size_for(30, 2) == (16, 1)
        assert size_for(0, 17) is None
        assert size_for(0, 1) == (1, 1)
        assert size_for(0, 4, samples=False) is None  # one of several pieces
        assert size_for(4, 4, first=LAST_SAMPLED) is None  # the host does not know them
        two = packer.pack([make_sequence(0, 0, (1, 2), (1,)), make_sequence(1, 0, (1,), (2,))])
        assert recorded._size_for(two) is None


def test_compiled_blocks_give_the_same_tokens(ref):
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with LLM(str(ref.path), device="cpu", compile=True) as llm:
        assert [output.token_ids for output in llm.generate(ref.prompts, plain())] == ref.tokens
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    with pytest.raises(YalisError, match="leave out --eager or --compile"):
        LLM(str(ref.path), eager=True, compile=True)


def test_memory_that_does_not_suffice_is_a_sentence(ref, monkeypatch):
    def fail(function, pool):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Graphs, "recording", staticmethod(fail))
    monkeypatch.setattr(oom, "free_bytes", lambda device: 2 << 30)
    with pytest.raises(YalisFailure) as told:
        open_llm(ref, monkeypatch)
    assert str(told.value) == (
        "cpu ran out of memory recording a prompt of 16 tokens: at least 3.0 GiB needed, 2.0 GiB free; "
        "give --max-batch-tokens 10 at most, or a smaller --kv-blocks, or --eager"
    )


def test_memory_left_by_earlier_steps_is_no_graphs(ref, monkeypatch):
    """Recording gives back what the allocator has kept of a warm-up; graphs take theirs meanwhile."""
    mib, device = 1 << 20, {"free": 1000 << 20, "kept": 700 << 20}

    def empty_cache():
        device["free"], device["kept"] = device["free"] + device["kept"], 0

    class Taking(Again):
        def __init__(self, function, pool):
            empty_cache()
            super().__init__(function, pool)
            device["free"] -= 5 * mib

    with open_llm(ref, monkeypatch) as llm, torch.inference_mode():
        recorded = llm._engine.runner.graphs
        recorded.forget()
        monkeypatch.setattr(recorded, "recording", Taking)
        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
        monkeypatch.setattr(graphs._Memory, "of", lambda _: graphs._Memory(device["free"], device["kept"]))
        recorded.record()
        assert recorded.nbytes == 5 * mib * len(recorded._recorded) > 0


def test_memory_that_graphs_took(ref, monkeypatch):
    """What the device has less, but not what another process took meanwhile."""
    mib = 1 << 20
    cpu, before = torch.device("cpu"), graphs._Memory(free=900 * mib, held=100 * mib)
    for free, held, graphs_made, taken in (
        (700, 280, 1, 200),
        (300, 280, 1, 180 + 64),
        (300, 280, 11, 600),
        (950, 100, 1, 0),
    ):
        now = graphs._Memory(free * mib, held * mib)
        monkeypatch.setattr(graphs._Memory, "of", partial(lambda now, device: now, now))
        assert before.taken(cpu, graphs_made) == taken * mib
    monkeypatch.undo()
    with LLM(str(ref.path), device="cpu") as llm:
        assert llm.stats.graph_bytes == 0  # tapes are the host's
        llm._engine.runner.graphs.nbytes = 5
        again = engine.Engine(llm.config, llm.spec, llm._team, frozenset())
        assert again.stats.graph_bytes == 5


def test_sizes_end_with_the_most_there_can_be():
    assert sizes_for(1) == [1]
    assert sizes_for(3) == [1, 2, 3]
    assert sizes_for(64) == [1, 2, 4, *range(8, 65, 8)]
    assert sizes_for(2000)[-1] == 512
    assert sizes_for(100) == [1, 2, 4, *range(8, 65, 8), 96, 100]


def make_sequence(slot: int, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> SequenceStep:
    return SequenceStep(slot, slot, start, tokens, blocks, True, 0, False, plain(), None)


def test_a_packed_step_is_filled_up():
    packer = Packer(max_num_seqs=4, most_blocks=5, block_size=4, rope_length=100)
    steps = [make_sequence(2, 9, (LAST_SAMPLED,), (7, 3, 5)), make_sequence(0, 2, (40,), (1,))]
    packed = packer.pack(steps)
    assert packed.decode_only
    out = np.full(100, 99)
    used = packed.fill(out, rows=3, nobody=4)
    assert used == 4 * (len(COLUMNS) + 3)  # a row is as wide as an even number
    lines = out[:used].reshape(-1, 4)[:, :3]
    columns = dict(zip(COLUMNS, lines[:6].tolist(), strict=True))
    assert columns == {
        "token": [LAST_SAMPLED, 40, 0],
        "position": [9, 2, 0],
        "rope row": [9, 2, 0],
        "slot": [5 * 4 + 1, 1 * 4 + 2, -1],
        "feeder": [2, 0, 4],
        "context": [10, 3, 1],
    }
    assert lines[6:].T.tolist() == [[7, 3, 5], [1, 0, 0], [0, 0, 0]]
    assert set(out[used:]) == {99}


def test_a_packed_prompt_is_filled_up():
    packer = Packer(max_num_seqs=4, most_blocks=5, block_size=4, rope_length=100)
    packed = packer.pack([make_sequence(2, 4, (40, 41, 42), (7, 3))])
    assert packed.lone_prompt
    out = np.full(100, 99)
    used = packed.fill_prompt(out, tokens=5, width=5)
    columns, starts, context, wanted, owner, table = split_prompt(out, 5, 5)
    assert dict(zip(PROMPT_COLUMNS, columns.tolist(), strict=True)) == {
        "token": [40, 41, 42, 0, 0],
        "position": [4, 5, 6, 0, 0],
        "rope row": [4, 5, 6, 0, 0],
        "slot": [12, 13, 14, -1, -1],
    }
    assert (starts.tolist(), context.tolist(), wanted.tolist(), owner.tolist()) == ([0, 3], [7], [2], [2])
    assert table.tolist() == [7, 3, 0, 0, 0]
    assert used == prompt_room(5, 5) == 4 * 6 + 4 * 2 + 5
    assert set(out[used:]) == {99}


def test_tables_follow_a_slots_next_holder():
    packer = Packer(max_num_seqs=2, most_blocks=5, block_size=4, rope_length=100)
    packer.pack([make_sequence(1, 9, (3,), (7, 3, 5))])
    packed = packer.pack([make_sequence(1, 0, (3, 4), (6,)), make_sequence(0, 8, (LAST_SAMPLED,), (1, 2, 4))])
    assert packed.tables.tolist() == [[6, 0, 0], [1, 2, 4]]
    assert packed.slots.tolist() == [24, 25, 16]
    assert packed.positions.tolist() == [0, 1, 8]
    assert packed.contexts.tolist() == [2, 9]
    assert packed.logit_rows.tolist() == [1, 2]
    assert not packed.decode_only

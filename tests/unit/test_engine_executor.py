"""StepExecutor with a stand-in for CUDA graphs on the CPU: steps padded to a bucket size, replayed and sampled from.

Only the capture differs from a GPU: the stand-in runs the captured function again.
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
from yalis.engine import engine, oom, step_layouts
from yalis.engine.executor import StepExecutor
from yalis.engine.expert_load import ExpertLoad
from yalis.engine.forward import ModelForward
from yalis.engine.packing import Packer, StepKind
from yalis.engine.recording import CudaGraphRecorder, DeviceMemory
from yalis.engine.step_layouts import PROMPT_SIZES, DecodeLayout, PromptLayout, StepLimits
from yalis.errors import YalisError, YalisFailure
from yalis.kernels import ops
from yalis.layers.mlp import MoE
from yalis.scheduling import settings
from yalis.scheduling.plan import LAST_SAMPLED, SequenceStep
from yalis.scheduling.scheduler import SchedulerConfig

token_feedback = pytest.importorskip("yalis.kernels.token_feedback", reason="triton is not installed")
STEPS = 6


class Rerun:
    """In place of a CUDA graph: runs the function again and writes its result where the first run did."""

    def __init__(self, function, pool):
        self._function, self.result = function, function()

    def replay(self):
        for kept, new in zip(self.result, self._function(), strict=True):
            if kept is not None:
                kept.copy_(new)


class Recorder(CudaGraphRecorder):
    graph_type = Rerun
    kv_cache = None  # to check that a capture does not write into it

    def capture_all(self, block_bytes):
        before = self.kv_cache.clone()
        assert before[:, :, 0].count_nonzero(), "warming up ran nothing"
        super().capture_all(block_bytes)
        assert torch.equal(self.kv_cache, before), "capturing wrote into the KV cache"


class Executor(StepExecutor):
    def run(self, step, hidden=None):
        result = super().run(step, hidden)
        # On a GPU the copy to the host comes before the next step in the stream.
        return result if result.tokens is None else replace(result, tokens=result.tokens.clone())


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    case = next(case for case in CASES if case.name == "qwen3-gqa4")
    return make_reference(case, tmp_path_factory.mktemp("graphs"), 1, make_prompts(1, (9, 1, 12), shared=0), STEPS)


def open_llm(path, monkeypatch, **fields) -> LLM:
    """As on a GPU: plans overlap, sampled tokens stay on the device, steps are replayed from what was captured."""

    def ahead(**fields):
        return SchedulerConfig(**{**fields, "max_in_flight": 2, "feed_on_device": True})

    monkeypatch.setattr(settings, "SchedulerConfig", ahead)
    monkeypatch.setattr(ops, "use_last_tokens", token_feedback.use_last_tokens)
    llm = LLM(
        str(path),
        device="cpu",
        attention="triton",
        kv_blocks=32,
        max_num_seqs=4,
        max_model_len=32,
        **{"max_batch_tokens": 22, **fields},
    )
    runner = llm._engine.runner
    runner.sampler.fused = True
    forward = ModelForward(runner.model, runner.backend, runner.last_tokens, picks=True)
    forward.kv_caches = runner.executor._forward.kv_caches
    with torch.inference_mode():
        limits = StepLimits(4, llm.config.max_batch_tokens, 32, 32 // runner.block_size)
        recorder = Recorder(forward, llm.config, limits)
        recorder.kv_cache = runner.pool._kv
        runner.executor = Executor(llm.config, forward, recorder)
        runner.executor.warm_up(runner._warm_up_steps(32), runner._block_bytes)
    return llm


def plain(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **fields})


def test_replayed_steps_match_the_reference(ref, monkeypatch):
    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        executor = llm._engine.runner.executor
        assert executor.recorder.layouts[StepKind.DECODE].sizes == [1, 2, 4]
        # The second ends early: steps of three sequences, padded to four, and of two.
        lengths = [STEPS, 2, STEPS]
        outputs = llm.generate(ref.prompts, [plain(max_tokens=n) for n in lengths])
        for output, expected, length in zip(outputs, ref.tokens, lengths, strict=True):
            assert output.token_ids == expected[:length]
        assert executor.replays >= STEPS - 2
        stats = llm.stats
        assert (stats.replayed_steps, stats.replayed_share) == (executor.replays, executor.replays / stats.steps)
        assert stats.padding_tokens == 1  # of the step of three sequences
        assert stats.mean_padding == pytest.approx(1 / executor.replays)
        assert llm._engine.scheduler.counters.fed_tokens > 0


def test_replayed_steps_count_the_chosen_experts_without_padding(tmp_path, monkeypatch):
    """As on ranks with whole experts, except that one rank has all of them."""
    case = next(case for case in CASES if case.name == "olmoe")
    ref = make_reference(case, tmp_path, 1, make_prompts(1, (9, 1, 12), shared=0), STEPS)
    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        runner = llm._engine.runner
        layers = [module for module in runner.model.modules() if isinstance(module, MoE)]
        for layer in layers:
            layer.counts = torch.zeros(layer.moe.num_experts + 1, dtype=torch.int64)
        runner.expert_load = ExpertLoad(runner.model, runner.grid, runner.device)
        outputs = llm.generate(ref.prompts, plain())
        assert [output.token_ids for output in outputs] == ref.tokens
        stats = llm.stats
        assert stats.padding_tokens > 0
        assert [int(layer.counts[-1]) for layer in layers] == [stats.padding_tokens * layers[0].moe.top_k] * 2
        # Both layers compute every decoded token; the last one leaves out prompt tokens that need no logits.
        decoded = len(ref.prompts) * (STEPS - 1)
        tokens = sum(map(len, ref.prompts)) + decoded + len(ref.prompts) + decoded
        assert stats.expert_load == [tokens * layers[0].moe.top_k]
        runner.expert_load.reset()
        assert llm.stats.expert_load == [0]
        assert stats.expert_imbalance == 1.0


def test_steps_that_mix_greedy_and_other_rows_go_through_the_sampler(ref, monkeypatch):
    """If one row is drawn, penalised or reported, the tokens that the graph picked are not used."""
    params = [plain(), plain(temperature=0.9, seed=3, logprobs=1), plain(repetition_penalty=1.3)]
    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        replayed = llm.generate(ref.prompts, params)
        assert llm._engine.runner.executor.replays > 0
    with LLM(str(ref.path), device="cpu", attention="sdpa", eager=True) as llm:
        eager = llm.generate(ref.prompts, params)
        assert llm._engine.runner.executor.replays == 0
    assert [output.token_ids for output in replayed] == [output.token_ids for output in eager]
    assert replayed[0].token_ids == ref.tokens[0]
    for ours, theirs in zip(replayed[1].logprobs, eager[1].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_mixed_sampling_needs_no_work_for_each_row(ref, monkeypatch):
    """Greedy and random rows with different filters, in replayed and in mixed steps: none goes through the sampler."""
    filters = [{}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 9, "top_p": 0.7}, {"min_p": 0.05}]
    params = [plain(), *(plain(temperature=1.1, seed=i, **fields) for i, fields in enumerate(filters))]
    prompts = [*ref.prompts, *ref.prompts]  # more than can run at once, so that prompts arrive while others decode
    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        runner = llm._engine.runner
        monkeypatch.setattr(runner, "_run_sampler", None)
        kinds = []
        pack = runner.packer.pack
        monkeypatch.setattr(runner.packer, "pack", lambda steps: kinds.append(pack(steps)) or kinds[-1])
        replayed = llm.generate(prompts, params)
        assert runner.recorded_picks > STEPS
        assert sum(step.kind is StepKind.MIXED and step.random is not None for step in kinds) > 1
    with LLM(str(ref.path), device="cpu", attention="sdpa", eager=True) as llm:
        eager = llm.generate(prompts, params)
    assert [output.token_ids for output in replayed] == [output.token_ids for output in eager]


def test_single_short_prompts_are_replayed(ref, monkeypatch):
    """Padded to 16 tokens, without and with a cached prefix. A longer prompt runs eagerly."""
    with open_llm(ref.path, monkeypatch, block_size=4) as llm, torch.inference_mode():
        runner = llm._engine.runner
        executor = runner.executor
        assert executor.recorder.layouts[StepKind.PROMPT].sizes == [16]
        ran = []
        monkeypatch.setattr(
            runner.packer, "pack", lambda steps: ran.append(Packer.pack(runner.packer, steps)) or ran[-1]
        )
        for prompt, expected in [*zip(ref.prompts, ref.tokens, strict=True)] * 2:
            before = executor.replays
            assert llm.generate(prompt, plain())[0].token_ids == expected
            assert executor.replays - before == len(ran)  # every step
            cached = ran[0].positions[0]
            assert ran[0].token_ids.tolist() == prompt[cached:]
            ran.clear()
        assert cached == 8  # the first two blocks of twelve tokens
        long = [*reversed(ref.prompts[0] + ref.prompts[2])]  # nothing of it is cached
        before = executor.replays
        (answer,) = llm.generate(long, plain())
        assert executor.replays - before == STEPS - 1
    with LLM(str(ref.path), device="cpu", attention="sdpa", eager=True) as llm:
        assert llm.generate(long, plain())[0].token_ids == answer.token_ids


def test_prompts_do_not_read_padding_or_unwritten_kv_slots(ref, monkeypatch):
    """Neither padding tokens, nor the rest of its own blocks, nor block 0, which padding points to."""
    with open_llm(ref.path, monkeypatch, block_size=4) as llm, torch.inference_mode():
        llm._engine.runner.pool._kv.fill_(torch.inf)
        for prompt, expected in zip(ref.prompts, ref.tokens, strict=True):
            assert llm.generate(prompt, plain())[0].token_ids == expected
        assert llm._engine.runner.executor.replays == 3 * STEPS


def test_prompt_sizes_cover_the_longest_possible_prompt():
    def sizes(max_len: int, max_batch_tokens: int) -> list[int]:
        return PromptLayout(StepLimits(1, max_batch_tokens, max_len, 1)).sizes

    assert sizes(10**5, 8192) == list(PROMPT_SIZES)
    assert sizes(10**5, 100) == [16, 32, 64]
    assert sizes(64, 8192) == [16, 32, 64]
    assert sizes(65, 8192) == [16, 32, 64, 128]
    assert sizes(9, 8192) == [16]
    assert sizes(9, 8) == []


@pytest.mark.parametrize("block_size", [4, 32])
def test_recorded_steps_do_not_read_past_their_block_tables(ref, monkeypatch, block_size):
    monkeypatch.setattr(step_layouts, "PROMPT_SIZES", (16, 64))  # the second is longer than a context of 32
    with open_llm(ref.path, monkeypatch, block_size=block_size, max_batch_tokens=64) as llm, torch.inference_mode():
        recorder = llm._engine.runner.executor.recorder
        assert (StepKind.PROMPT, 64) in recorder._recorded
        for kind, size in list(recorder._recorded):
            recorder._buffer.packed.fill_(10**6)
            recorder._capture(recorder.layouts[kind], size)
            batch = recorder._recorded[kind, size].inputs.batch
            assert batch.context_len.max() <= batch.block_tables.shape[1] * block_size, (kind, size)
            assert batch.block_tables.max() < llm._engine.runner.num_blocks


def test_which_steps_are_replayed(ref, monkeypatch):
    packer = Packer(max_num_seqs=2, max_blocks=8, block_size=4, rope_length=100)
    with open_llm(ref.path, monkeypatch, block_size=4) as llm:
        recorder = llm._engine.runner.executor.recorder

        def find(*steps: SequenceStep) -> tuple[StepKind, int] | None:
            found = recorder.find(packer.pack(steps))
            return None if found is None else (found.layout.kind, found.size)

        def sequence(start: int, count: int, samples: bool = True, first: int = 5) -> SequenceStep:
            blocks = tuple(range(-(-(start + count) // 4)))
            return make_sequence(1, start, (first,) * count, blocks)._replace(samples=samples)

        for start, count in ((0, 2), (16, 16), (30, 2)):
            assert find(sequence(start, count)) == (StepKind.PROMPT, 16)
        assert find(sequence(0, 17)) is None
        assert find(sequence(0, 1)) == (StepKind.DECODE, 1)
        assert find(sequence(0, 4, samples=False)) is None  # a chunk of a prompt
        assert find(sequence(4, 4, first=LAST_SAMPLED)) is None  # token ids that the host does not have
        assert find(make_sequence(0, 0, (1, 2), (1,)), make_sequence(1, 0, (1,), (2,))) is None


def test_compiled_blocks_give_the_same_tokens(ref):
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with LLM(str(ref.path), device="cpu", compile=True) as llm:
        assert [output.token_ids for output in llm.generate(ref.prompts, plain())] == ref.tokens
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    with pytest.raises(YalisError, match="give eager=True or compile=True"):
        LLM(str(ref.path), eager=True, compile=True)


def test_out_of_memory_in_a_capture_says_what_fits(ref, monkeypatch):
    def fail(function, pool):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Recorder, "graph_type", staticmethod(fail))
    monkeypatch.setattr(oom, "free_bytes", lambda device: 2 << 30)
    with pytest.raises(YalisFailure) as failure:
        open_llm(ref.path, monkeypatch)
    assert str(failure.value) == (
        "cpu ran out of memory capturing the CUDA graph of a prompt of 16 tokens: at least 3.0 GiB needed, 2.0 GiB "
        "free; give max_batch_tokens=10 or less, or a smaller kv_blocks=, or eager=True"
    )


def test_cached_memory_of_earlier_steps_is_not_counted_as_the_graphs(ref, monkeypatch):
    """A capture releases what the allocator has cached since the warm-up, while the graphs take their own memory."""
    mib, device = 1 << 20, {"free": 1000 << 20, "cached": 700 << 20}

    def empty_cache():
        device["free"], device["cached"] = device["free"] + device["cached"], 0

    class Allocating(Rerun):
        def __init__(self, function, pool):
            empty_cache()
            super().__init__(function, pool)
            device["free"] -= 5 * mib

    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        recorder = llm._engine.runner.executor.recorder
        recorder.clear()
        monkeypatch.setattr(recorder, "graph_type", Allocating)
        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
        monkeypatch.setattr(DeviceMemory, "now", lambda _: DeviceMemory(device["free"], device["cached"]))
        recorder.capture_all(0)
        assert recorder.nbytes == 5 * mib * 2 * len(recorder._recorded) > 0  # each with a graph for the sampling


def test_the_memory_of_graphs_is_estimated_from_the_two_largest_of_each_layout(ref, monkeypatch):
    """The largest prompt takes 50 MiB, the largest decode step 40, and every other graph 5."""
    taken, captured = {16: 50 << 20, 4: 40 << 20}, []
    with open_llm(ref.path, monkeypatch) as llm, torch.inference_mode():
        recorder = llm._engine.runner.executor.recorder
        free = [1000 << 20]
        capture = recorder._capture

        def allocate(layout, size, block_bytes=0):
            captured.append((layout.kind.value, size))
            free[0] -= taken.get(size, 5 << 20)
            capture(layout, size, block_bytes)

        monkeypatch.setattr(recorder, "_capture", allocate)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(DeviceMemory, "now", lambda _: DeviceMemory(free[0], 0))
        assert recorder.measure() == (50 + 40 + 2 * 5) << 20
        assert captured == [("prompt", 16), ("decode", 4), ("decode", 2)]
        assert not recorder._recorded


def test_memory_taken_by_graphs(ref, monkeypatch):
    """The decrease of free memory, without what another process allocated meanwhile."""
    mib = 1 << 20
    cpu, before = torch.device("cpu"), DeviceMemory(free=900 * mib, reserved=100 * mib)
    for free, reserved, graphs, taken in (
        (700, 280, 1, 200),
        (300, 280, 1, 180 + 64),
        (300, 280, 11, 600),
        (950, 100, 1, 0),
    ):
        now = DeviceMemory(free * mib, reserved * mib)
        monkeypatch.setattr(DeviceMemory, "now", partial(lambda now, device: now, now))
        assert before.bytes_taken(cpu, graphs) == taken * mib
    monkeypatch.undo()
    with LLM(str(ref.path), device="cpu") as llm:
        assert llm.stats.graph_bytes == 0  # recorded CPU steps are in host memory
        llm._engine.runner.executor.recorder.nbytes = 5
        again = engine.Engine(llm.config, llm.spec, llm._engine.ranks, frozenset())
        assert again.stats.graph_bytes == 5


def test_decode_sizes_end_with_the_largest_batch():
    def sizes(max_num_seqs: int) -> list[int]:
        return DecodeLayout(StepLimits(max_num_seqs, 8192, 100, 1)).sizes

    assert sizes(1) == [1]
    assert sizes(3) == [1, 2, 3]
    assert sizes(64) == [1, 2, 4, *range(8, 65, 8)]
    assert sizes(2000)[-1] == 512
    assert sizes(100) == [1, 2, 4, *range(8, 65, 8), 96, 100]


def make_sequence(slot: int, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> SequenceStep:
    return SequenceStep(slot, slot, start, tokens, blocks, True, 0, False, plain(), None)


def test_decode_steps_are_padded():
    packer = Packer(max_num_seqs=4, max_blocks=5, block_size=4, rope_length=100)
    packed = packer.pack([make_sequence(2, 9, (LAST_SAMPLED,), (7, 3, 5)), make_sequence(0, 2, (40,), (1,))])
    assert packed.kind is StepKind.DECODE
    layout = DecodeLayout(StepLimits(4, 8, 20, 5))
    out = np.full(100, 99)
    used = layout.fill(out, 3, packed)
    assert used == 4 * (len(layout.columns) + 3) <= layout.buffer_len(3)  # rows are padded to an even number
    lines = out[:used].reshape(-1, 4)[:, :3]
    assert dict(zip(layout.columns, lines[:6].tolist(), strict=True)) == {
        "token_ids": [LAST_SAMPLED, 40, 0],
        "positions": [9, 2, 0],
        "rope_rows": [9, 2, 0],
        "kv_slots": [5 * 4 + 1, 1 * 4 + 2, -1],
        "request_slots": [2, 0, 4],
        "context_lens": [10, 3, 1],
    }
    assert lines[6:].T.tolist() == [[7, 3, 5], [1, 0, 0], [0, 0, 0]]
    assert set(out[used:]) == {99}


def test_prompts_are_padded():
    packer = Packer(max_num_seqs=4, max_blocks=5, block_size=4, rope_length=100)
    packed = packer.pack([make_sequence(2, 4, (40, 41, 42), (7, 3))])
    assert packed.kind is StepKind.PROMPT
    layout = PromptLayout(StepLimits(4, 8, 20, 5))
    out = np.full(100, 99)
    used = layout.fill(out, 5, packed)
    columns, query_starts, context_len, logit_row, request_slot, table = layout._split(out, 5)
    assert dict(zip(layout.columns, columns.tolist(), strict=True)) == {
        "token_ids": [40, 41, 42, 0, 0],
        "positions": [4, 5, 6, 0, 0],
        "rope_rows": [4, 5, 6, 0, 0],
        "kv_slots": [12, 13, 14, -1, -1],
    }
    cells = query_starts, context_len, logit_row, request_slot
    assert [cell.tolist() for cell in cells] == [[0, 3], [7], [2], [2]]
    assert table.tolist() == [7, 3, 0, 0, 0]
    assert used == layout.buffer_len(5) == 4 * 6 + 4 * 2 + 5
    assert set(out[used:]) == {99}


def test_block_tables_follow_the_next_request_of_a_slot():
    packer = Packer(max_num_seqs=2, max_blocks=5, block_size=4, rope_length=100)
    packer.pack([make_sequence(1, 9, (3,), (7, 3, 5))])
    packed = packer.pack([make_sequence(1, 0, (3, 4), (6,)), make_sequence(0, 8, (LAST_SAMPLED,), (1, 2, 4))])
    assert packed.block_tables.tolist() == [[6, 0, 0], [1, 2, 4]]
    assert packed.kv_slots.tolist() == [24, 25, 16]
    assert packed.positions.tolist() == [0, 1, 8]
    assert packed.context_lens.tolist() == [2, 9]
    assert packed.logit_rows.tolist() == [1, 2]
    assert packed.kind is StepKind.MIXED

"""Profiled decode steps: averaging, and that no prefill is included."""

from __future__ import annotations

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis import LLM
from yalis.errors import YalisError
from yalis.perfmodel.timeline import Span
from yalis.study.kernels.step_times import KernelTime, average_step, measure_step, start_decoding


def test_gaps_and_overlap_are_separated():
    # Two steps of 10 us: a from 0 to 4, b overlapping it from 3 to 6, a gap, a from 8 to 10.
    spans = [
        Span(name, 1000 * (base + start), 1000 * (base + end))
        for base in (0, 10)
        for name, start, end in (("a", 0, 4), ("b", 3, 6), ("a", 8, 10))
    ]
    times = average_step(spans[::-1], 2)
    assert (times.us, times.gaps, times.overlap) == (10, 2, 1)
    assert times.kernels == [KernelTime("a", 2, 6), KernelTime("b", 1, 3)]


def test_profiling_kernels_on_a_cpu_is_refused(tmp_path):
    with (
        LLM(str(save_tiny_chat(tmp_path / "model")), threads=1, device="cpu") as llm,
        pytest.raises(YalisError, match="on a GPU"),
    ):
        measure_step(llm, 1, 4)


def test_warm_up_of_a_second_batch_does_not_count_tokens_of_the_first(tmp_path):
    # The statistics of the engine count tokens since its start.
    with LLM(str(save_tiny_chat(tmp_path / "model")), threads=1, device="cpu", prefix_reuse=False) as llm:
        for batch in (4, 1):
            tokens, steps = llm.stats.output_tokens, llm.stats.steps
            start_decoding(llm, batch, 20, 12)
            assert llm.stats.output_tokens - tokens == 8 * batch
            assert llm.stats.steps - steps == 8  # one prefill step and seven decode steps
            assert llm.num_unfinished == batch
            while llm.num_unfinished:
                llm.poll()

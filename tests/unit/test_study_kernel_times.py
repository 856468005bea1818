"""The arithmetic of a profiled step."""

from __future__ import annotations

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis import LLM
from yalis.errors import YalisError
from yalis.perfmodel.timeline import Span
from yalis.study.kernel_times import KernelTime, add_up, measure_step


def test_gaps_and_overlap_are_told_apart():
    # Two steps of 10 us: a from 0 to 4, b beside its end from 3 to 6, a gap, a from 8 to 10.
    spans = [
        Span(name, 1000 * (base + start), 1000 * (base + end))
        for base in (0, 10)
        for name, start, end in (("a", 0, 4), ("b", 3, 6), ("a", 8, 10))
    ]
    times = add_up(spans[::-1], 2)
    assert (times.us, times.gaps, times.overlap) == (10, 2, 1)
    assert times.kernels == [KernelTime("a", 2, 6), KernelTime("b", 1, 3)]


def test_a_cpu_is_refused(tmp_path):
    with (
        LLM(str(save_tiny_chat(tmp_path / "model")), threads=1, device="cpu") as llm,
        pytest.raises(YalisError, match="on a GPU"),
    ):
        measure_step(llm, 1, 4)

"""Breaking a timeline down: each instant counts for one category, and gaps add up to idle time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yalis.perfmodel.timeline import (
    CATEGORIES,
    Span,
    assign_time,
    break_down,
    categorize,
    device_windows,
    flatten,
    host_windows,
    time_by_name,
)

#: One name of each category and its priority.
NAMES = {"native::linear": 0, "native::attend": 1, "aten::add": 2, "comm::all_reduce": 3}


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("native::linear", "matmul"),
        ("native::expert_linear", "matmul"),
        ("native::attend", "attention"),
        ("native::rms_norm", "other"),
        ("comm::all_reduce", "communication"),
        ("aten::linear", "matmul"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::index_select", "other"),
        ("aten::view", None),
        ("aten::empty_like", None),
        ("yalis::linear", None),
        ("cudaLaunchKernel", None),
    ],
)
def test_calls_on_a_cpu(name: str, category: str | None) -> None:
    assert categorize(name) == category


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("_gemv_kernel", "matmul"),
        ("_expert_gemv_kernel", "matmul"),
        ("_expert_gemm_kernel", "matmul"),
        ("_route_kernel", "other"),
        ("_group_kernel", "other"),
        ("_combine_kernel", "other"),
        ("_skinny_gemm_kernel", "matmul"),
        ("_one_row", "matmul"),  # named so in earlier profiles
        ("_few_rows", "matmul"),
        ("_gated_product", "matmul"),
        ("_gated", "other"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "matmul"),
        ("_paged_decode_kernel", "attention"),
        ("_paged_prefill_kernel", "attention"),
        ("_decode", "attention"),  # named so in earlier profiles
        ("_prefill", "attention"),
        ("_join", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void (anonymous namespace)::all_reduce_kernel<__nv_bfloat16, nvrar::Words>(nvrar::Group)", "communication"),
        ("void (anonymous namespace)::one_shot_kernel<float>(nvrar::FlatGroup, nvrar::Call)", "communication"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>>", "other"),
        ("_add_rms_norm_kernel", "other"),
        ("_rope_write_kernel", "other"),
        ("_argmax_reduce_kernel", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
    ],
)  # fmt: skip
def test_kernels_of_a_gpu(name: str, category: str) -> None:
    assert categorize(name, on_gpu=True) == category


def non_zero_parts(spans: list[Span], *windows: tuple[int, int]) -> list[dict[str, int]]:
    """Return the categories of each window that are not zero."""
    found = break_down(flatten(assign_time(spans)), windows)
    parts = [{**one.category_ns, "idle": one.idle_ns} for one in found]
    return [{name: ns for name, ns in one.items() if ns} for one in parts]


def test_a_call_includes_nested_calls() -> None:
    spans = [
        Span("yalis::anything", 0, 100),  # wraps the others
        Span("comm::all_reduce", 10, 40),
        Span("aten::add", 20, 30),
        Span("aten::reshape", 50, 80),
        Span("aten::copy_", 55, 70),
    ]
    assert non_zero_parts(spans, (0, 100)) == [{"communication": 30, "other": 15, "idle": 55}]


def test_an_early_launched_kernel_begins_when_the_previous_one_ends() -> None:
    spans = [Span("aten::add", 0, 10, lane=7), Span("aten::mm", 4, 20, lane=7)]
    assert non_zero_parts(spans, (0, 20)) == [{"other": 10, "matmul": 10}]


def test_communication_that_overlaps_with_computation_costs_nothing() -> None:
    spans = [Span("comm::all_reduce", 0, 30, lane=1), Span("aten::mm", 10, 20, lane=2)]
    assert non_zero_parts(spans, (0, 40)) == [{"communication": 20, "matmul": 10, "idle": 10}]


def test_windows_split_intervals_that_cross_them() -> None:
    spans = [Span("aten::mm", 5, 25), Span("aten::mm", 30, 32)]
    windows = host_windows([0, 10, 20], 40)
    assert windows == [(0, 10), (10, 20), (20, 40)]
    assert non_zero_parts(spans, *windows) == [{"matmul": 5, "idle": 5}, {"matmul": 10}, {"matmul": 7, "idle": 13}]


def test_device_windows_follow_the_kernels_not_the_host() -> None:
    # The host begins steps at 0, 2 and 4; the kernels of each start at 10, 20 and 30.
    spans = [Span("_gemv_kernel", start, start + 8, issued=issued) for start, issued in ((30, 5), (10, 1), (20, 3))]
    assert device_windows([0, 2, 4], 40, spans) == [(0, 20), (20, 30), (30, 40)]


def test_the_first_window_begins_after_kernels_of_earlier_steps() -> None:
    spans = [
        Span("_gemv_kernel", 0, 9, issued=-5),
        Span("_gemv_kernel", 9, 12, issued=1),
        Span("_gemv_kernel", 14, 16, issued=3),
    ]
    assert device_windows([0, 2], 20, spans) == [(9, 14), (14, 20)]


def test_a_step_without_kernels_takes_no_time() -> None:
    spans = [Span("_gemv_kernel", 1, 4, issued=0), Span("_gemv_kernel", 6, 8, issued=25)]
    assert device_windows([0, 10, 20], 30, spans) == [(0, 6), (6, 6), (6, 30)]


def test_an_interval_counts_in_the_window_where_it_begins() -> None:
    intervals = assign_time([Span("aten::mm", 0, 4), Span("aten::mm", 12, 30), Span("aten::add", 22, 40, lane=1)])
    found = [(one.name, one.count, one.ns) for one in time_by_name(intervals, [(10, 20), (20, 30)])]
    assert found == [("aten::add", 1, 18), ("aten::mm", 1, 18)] or found == [("aten::mm", 1, 18), ("aten::add", 1, 18)]


SPANS = st.lists(
    st.builds(
        lambda name, start, length, lane: Span(name, start, start + length, lane),
        st.sampled_from([*NAMES, "yalis::wrapper"]),
        st.integers(0, 30),
        st.integers(0, 12),
        st.integers(0, 2),
    ),
    max_size=14,
)


@given(SPANS, st.lists(st.integers(0, 45), min_size=2, max_size=4, unique=True))
def test_every_instant_counts_once(spans: list[Span], edges: list[int]) -> None:
    """Compare with a count of every nanosecond."""
    edges.sort()
    windows = list(pairwise(edges))
    taken: dict[int, dict[int, int]] = {}  # by lane and instant
    ordered = sorted((span for span in spans if span.name in NAMES), key=lambda span: (span.start, -span.end))
    for span in ordered:
        lane = taken.setdefault(span.lane, {})
        for instant in range(span.start, span.end):
            lane.setdefault(instant, NAMES[span.name])
    for (begin, end), found in zip(windows, break_down(flatten(assign_time(spans)), windows), strict=True):
        expected = dict.fromkeys([*CATEGORIES, "idle"], 0)
        for instant in range(begin, end):
            running = [lane[instant] for lane in taken.values() if instant in lane]
            expected[CATEGORIES[min(running)] if running else "idle"] += 1
        assert {**found.category_ns, "idle": found.idle_ns} == expected
        assert found.total == end - begin

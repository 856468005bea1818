"""Compile the Triton kernels for Hopper without a GPU: python -m tests.hopper prints a summary of their PTX as JSON.

Runs in its own process, because Triton's interpreter must be off. It covers what the interpreter cannot run:
programmatic dependent launch, L2 prefetches and TMA.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from yalis.kernels import fused, gated_product, kv_splits, paged_attention, skinny, token_feedback

POINTERS = {
    **dict.fromkeys(("counter_ptr", "plan_ptr", "query_start_ptr"), "*i32"),
    **dict.fromkeys(("partial_ptr", "partial_out_ptr", "partial_lse_ptr", "packed_ptr"), "*fp32"),
    **dict.fromkeys(("k_cache", "v_cache", "x_desc", "w_desc"), "*bf16"),
    **dict.fromkeys(
        ("context_len_ptr", "tables_ptr", "tile_sequence_ptr", "tile_start_ptr", "slots_ptr", "ids_ptr", "last_ptr",
         "request_slots_ptr", "best_ids_ptr", "best_ptr", "index_ptr", "rows_ptr"), "*i64"
    ),
}  # fmt: skip
FLOATS = ("eps", "scale", "softcap")
#: PTX instructions to report, in the order in which they appear.
EVENTS = {
    "launch dependents": r"griddepcontrol\.launch_dependents",
    "prefetch": r"prefetch\.global\.L2",
    "wait": r"griddepcontrol\.wait",
    "weights": r"ld\.global\S*evict_first",
    "async copy": r"cp\.async\.cg",
    "tma load": r"cp\.async\.bulk\.tensor",
    "load": r"ld\.global(?!\S*evict_first)",
    "mma": r"wgmma\.mma_async",
    "atomic add": r"atom\.\S*acq_rel\S*add",
    "store": r"st\.global",
}


def compile_kernel(
    kernel: Any, constants: dict[str, Any], warps: int, stages: int, tiles: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the order of the EVENTS (repeats dropped), the widths of weight loads and the bytes of shared memory.

    `tiles`: block shapes of the arguments that are tensor descriptors, by name.
    """
    tiles = tiles or {}
    names = kernel.arg_names
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in tiles:
            types[name] = f"tensordesc<bf16[{tiles[name]}]>"
        elif name == "out_ptr" and "request_slots_ptr" in names:  # token ids
            types[name] = "*i64"
        elif name.endswith("_ptr") or name in POINTERS:
            types[name] = POINTERS.get(name, "*bf16")
        else:
            types[name] = "fp32" if name in FLOATS else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name] not in ("constexpr", "fp32") and name not in tiles
    }
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = made.asm["ptx"]
    pattern = re.compile("|".join(f"(?P<e{i}>{regex})" for i, regex in enumerate(EVENTS.values())))
    found = [list(EVENTS)[int(str(match.lastgroup)[1:])] for match in pattern.finditer(text)]
    return {
        "order": [event for i, event in enumerate(found) if i == 0 or found[i - 1] != event],
        "loads": _widths(text),
        "shared": made.metadata.shared,
    }


def _widths(text: str) -> list[str]:
    """Return the distinct vector widths of weight loads."""
    return sorted(set(re.findall(r"ld\.global\S*evict_first\S*?(v\d\.b\d+)", text)))


def main() -> None:
    flags = {"ACTIVATION": "silu", "BIAS": False, "PDL": True}
    gemv = {"K": 4096, "BLOCK_N": 1, "BLOCK_K": 2048, **flags}
    block = {"OWNED_N": 56, "BLOCK_N": 64, "BLOCK_K": 64, "EVEN_K": True, "SPLIT_K": 2}
    gemm = {"BLOCK_M": 16, **block, "USE_TMA": False, "LINE_ELEMENTS": 64, "LINES": 4, **flags}
    gemm_tma = {**gemm, "BLOCK_M": 128, "OWNED_N": 64, "USE_TMA": True}
    gemm_tiles = {"x_desc": "128,64", "w_desc": "64,64"}
    head = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128}
    decode = {**head, "BLOCK_SIZE": 16, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_G": 4, "MERGE_CHUNK": 8}
    decode |= {"USE_TMA": False, "SOFTCAP": False, "SINKS": False, "PDL": True}
    decode_tma = {**decode, "BLOCK_SIZE": 64, "USE_TMA": True}
    decode_tiles = dict.fromkeys(("k_cache", "v_cache"), "1,32,128")
    prefill = {**head, "BLOCK_SIZE": 64, "BLOCK_M": 128, "BLOCK_N": 64, "USE_TMA": True}
    prefill |= {"WINDOW": False, "SOFTCAP": False, "SINKS": False}
    prefill_tiles = dict.fromkeys(("k_cache", "v_cache"), "1,64,128")
    rope = {"H": 32, "K": 8, "D": 128, "BLOCK_D": 128, "ROTARY_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 8}
    rope |= {"NORM": True, "NORM_LAST": False, "PDL": True}
    norm = {"C": 4096, "BLOCK_C": 4096, "RESIDUAL": True, "PDL": True}
    gate_up = {"PROGRAMS": 132, "GROUP": 8, "BM": 128, "BN": 128, "BK": 64, "ACTIVATION": "silu", "BIAS": False}
    gate_up_tiles = {"y_tiles": "128,128", "x_tiles": "128,64", "w_tiles": "2,128,64"}
    with_pdl = {
        "gemv": compile_kernel(skinny._gemv_kernel, gemv, 8, 1),
        "gemm": compile_kernel(skinny._skinny_gemm_kernel, gemm, 4, 3),
        "gemm, TMA": compile_kernel(skinny._skinny_gemm_kernel, gemm_tma, 4, 3, gemm_tiles),
        "norm": compile_kernel(fused._add_rms_norm_kernel, norm, 16, 1),
        "rope": compile_kernel(fused._rope_write_kernel, rope, 4, 3),
        "decode": compile_kernel(paged_attention._paged_decode_kernel, decode, 2, 3),
        "decode, TMA": compile_kernel(paged_attention._paged_decode_kernel, decode_tma, 2, 3, decode_tiles),
        "split plan": compile_kernel(kv_splits.plan_splits, {"BLOCK_N": 32, "WINDOW": False, "PDL": True}, 4, 3),
        "use_last_tokens": compile_kernel(token_feedback._use_last_tokens, {"BLOCK": 128, "PDL": True}, 4, 3),
        "pick_greedy": compile_kernel(token_feedback._pick_greedy, {"NONE": -1, "BLOCK": 128, "PDL": True}, 4, 3),
        "find_best": compile_kernel(token_feedback._find_best, {"RANKS": 4, "BLOCK": 128, "PDL": True}, 4, 3),
        "pick_best": compile_kernel(
            token_feedback._pick_best, {"NONE": -1, "RANKS": 4, "BLOCK": 128, "PDL": True}, 4, 3
        ),
        "argmax, chunks": compile_kernel(fused._argmax_chunk_kernel, {"BLOCK_V": 2048, "PDL": True}, 4, 3),
        "argmax, reduction": compile_kernel(fused._argmax_reduce_kernel, {"BLOCK_CHUNKS": 64, "PDL": True}, 1, 3),
        "gather_rows": compile_kernel(fused._gather_rows_kernel, {"BLOCK_C": 2048, "PDL": True}, 4, 3),
        "gate": compile_kernel(fused._gated_kernel, {"BLOCK_W": 1024, "ACTIVATION": "silu", "PDL": True}, 4, 3),
    }
    without_pdl = {
        "prefill": compile_kernel(paged_attention._paged_prefill_kernel, prefill, 8, 3, prefill_tiles),
        "gate and up": compile_kernel(gated_product._gated_product, gate_up, 8, 3, gate_up_tiles),
    }
    print(json.dumps((with_pdl, without_pdl)))


if __name__ == "__main__":
    main()

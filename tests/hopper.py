"""Compile kernels for a Hopper GPU, which takes none: python -m tests.hopper prints what their machine code does.

Not in Triton's interpreter, so in a process of its own. What only a GPU can run (dependent launches, prefetches) is
seen here at least by the compiler.
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
    **dict.fromkeys(("arrived_ptr", "counter_ptr", "plan_ptr", "query_start_ptr"), "*i32"),
    **dict.fromkeys(("part_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32"),
    **dict.fromkeys(("q_weight", "k_weight", "k_cache", "v_cache", "x_tiles", "w_tiles"), "*bf16"),
    **dict.fromkeys(
        ("context_len_ptr", "tables_ptr", "tile_sequence_ptr", "tile_start_ptr", "slots_ptr", "ids_ptr", "last_ptr",
         "request_slots_ptr", "best_ids_ptr", "best_ptr", "place_ptr", "rows_ptr"), "*i64"
    ),
}  # fmt: skip
FLOATS = ("eps", "scale", "softcap")
#: In the order they appear: weights asked for, weights loaded, the launch before awaited, anything else loaded.
EVENTS = {
    "start next": r"griddepcontrol\.launch_dependents",
    "prefetch": r"prefetch\.global\.L2",
    "wait": r"griddepcontrol\.wait",
    "weights": r"ld\.global\S*evict_first",
    "copy": r"cp\.async\.cg",
    "tile": r"cp\.async\.bulk\.tensor",
    "load": r"ld\.global(?!\S*evict_first)",
    "product": r"wgmma\.mma_async",
    "count": r"atom\.\S*acq_rel\S*add",
    "store": r"st\.global",
}


def compiled(
    kernel: Any, constants: dict[str, Any], warps: int, stages: int, tiles: dict[str, str] | None = None
) -> dict[str, Any]:
    """The order in which things happen, how wide matrices are loaded, and the bytes of shared memory.

    `tiles`: the shapes that descriptors have, by name.
    """
    tiles = tiles or {}
    names = kernel.arg_names
    kinds = {}
    for name in names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name in tiles:
            kinds[name] = f"tensordesc<bf16[{tiles[name]}]>"
        elif name == "out_ptr" and "request_slots_ptr" in names:  # tokens
            kinds[name] = "*i64"
        elif name.endswith("_ptr") or name in POINTERS:
            kinds[name] = POINTERS.get(name, "*bf16")
        else:
            kinds[name] = "fp32" if name in FLOATS else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if kinds[name] not in ("constexpr", "fp32") and name not in tiles
    }
    source = ASTSource(kernel, kinds, {(names.index(name),): value for name, value in constants.items()}, aligned)
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
    """How matrices are loaded, each kind once."""
    return sorted(set(re.findall(r"ld\.global\S*evict_first\S*?(v\d\.b\d+)", text)))


def main() -> None:
    flags = {"ACTIVATION": "silu", "BIAS": False, "PDL": True}
    one = {"K": 4096, "BN": 1, "BK": 2048, **flags}
    part = {"OWN": 56, "BN": 64, "BK": 64, "EVEN": True, "SPLITS": 2}
    few = {"RP": 16, **part, "DESCRIBED": False, "LINE": 64, "LINES": 4, **flags}
    tiled = {**few, "RP": 128, "OWN": 64, "DESCRIBED": True}
    tiles = {"x_tiles": "128,64", "w_tiles": "64,64"}
    head = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128}
    tile = {**head, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_G": 4, "MERGE_CHUNK": 8}
    decode = {**tile, "SOFTCAP": False, "PDL": True, "BLOCK_SIZE": 16, "USE_TMA": False}
    decode_tma = {**decode, "BLOCK_SIZE": 64, "USE_TMA": True}
    keys = dict.fromkeys(("k_cache", "v_cache"), "1,32,128")
    heads = {"H": 32, "K": 8, "D": 128, "DP": 128, "DIM": 128, "B": 16, "M": 8, "NORM": True, "PDL": True}
    flags_off = {"WINDOW": False, "SOFTCAP": False}
    prefill = {**head, "BLOCK_SIZE": 64, "BLOCK_M": 128, "BLOCK_N": 64, "USE_TMA": True, **flags_off}
    blocks = dict.fromkeys(("k_cache", "v_cache"), "1,64,128")
    sides = {"PROGRAMS": 132, "GROUP": 8, "BM": 128, "BN": 128, "BK": 64, "ACTIVATION": "silu", "BIAS": False}
    sums = {"y_tiles": "128,128", "x_tiles": "128,64", "w_tiles": "2,128,64"}
    dependent = {
        "one row": compiled(skinny._one_row, one, 8, 1),
        "few rows": compiled(skinny._few_rows, few, 4, 3),
        "128 rows": compiled(skinny._few_rows, tiled, 4, 3, tiles),
        "norm": compiled(fused._add_rms_norm, {"C": 4096, "BC": 4096, "BRANCH": True, "PDL": True}, 16, 1),
        "rope": compiled(fused._rope_write, heads, 4, 3),
        "decode": compiled(paged_attention._paged_decode_kernel, decode, 2, 3),
        "decode, TMA": compiled(paged_attention._paged_decode_kernel, decode_tma, 2, 3, keys),
        "split plan": compiled(kv_splits.plan_splits, {"BLOCK_N": 32, "WINDOW": False, "PDL": True}, 4, 3),
        "use_last_tokens": compiled(token_feedback._use_last_tokens, {"BLOCK": 128, "PDL": True}, 4, 3),
        "pick_greedy": compiled(token_feedback._pick_greedy, {"NONE": -1, "BLOCK": 128, "PDL": True}, 4, 3),
        "best of a part": compiled(fused._best_of_part, {"BV": 2048, "PDL": True}, 4, 3),
        "best of parts": compiled(fused._best_of_parts, {"BP": 64, "PDL": True}, 1, 3),
        "take": compiled(fused._take, {"BC": 2048, "PDL": True}, 4, 3),
        "gate": compiled(fused._gated, {"BW": 1024, "ACTIVATION": "silu", "PDL": True}, 4, 3),
    }
    waiting = {
        "prompts": compiled(paged_attention._paged_prefill_kernel, prefill, 8, 3, blocks),
        "gate and up": compiled(gated_product._gated_product, sides, 8, 3, sums),
    }
    print(json.dumps((dependent, waiting)))


if __name__ == "__main__":
    main()

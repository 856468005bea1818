"""Times of single CUDA kernels of the engine, from a roofline with measured efficiencies.

Launch configurations come from the engine itself (kernels/skinny_config.py and the split plan of kernels/kv_splits.py),
so that uneven tiles, split-K and few programs per GPU count as they will run. A kernel takes a fixed time plus the
longer of reading and computing; the two are joined smoothly.

Parameters (efficiencies/h200.json). `_s` are seconds, `_eff` shares of the device's read or matmul rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.ops import FUSED_GATE_MIN_ROWS
from yalis.kernels.skinny_config import MAX_ROWS, TMA_ROWS, TUNED, GemmShape, choose_config
from yalis.perfmodel.floors import ModelDims
from yalis.planner.efficiency import Efficiencies

# Those of kernels/paged_attention.py, which needs Triton; tests/unit/test_planner_compute.py compares them.
ATTENTION_BLOCK = 32  # keys of a tile of the decode kernel
PROGRAMS_PER_SM = 4  # decode attention programs that fill an SM
MERGE_ELEMENTS = 4096
PREFILL_ROWS = 128  # rows of a tile of the prefill kernel
#: Tiles of the output that cuBLAS chooses from, rows x columns.
_GEMM_TILES = tuple((m, n) for m in (64, 96, 128, 160, 192, 256) for n in (64, 96, 128, 192, 256) if m * n <= 192 * 192)


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of kernels on a GPU with these rates."""

    table: Efficiencies
    read: float  # bytes/s
    matmul: float  # FLOP/s
    limits: GpuLimits
    itemsize: int
    _linears: dict[tuple[int, int, int, bool], float] = field(default_factory=dict, compare=False)  # times computed

    def elementwise(self, rows: int, width: float) -> float:
        """An element-wise kernel; `width` is the elements of a row that it reads and writes."""
        table = self.table
        return table["kernel_s"] + rows * width * self.itemsize / (self.read * table["elementwise_eff"])

    def norm(self, rows: int, hidden: int, arrays: int = 4) -> float:
        """RMSNorm, one program for each row; `arrays`: those read and written, 4 with the addition of a residual."""
        return self.elementwise(rows, arrays * hidden) + self.table["norm_s"] * hidden / 4096

    def linear(self, rows: int, n: int, k: int, gated: bool = False) -> float:
        """x[rows, k] weight[n, k]^T, with n the rows of gate and up together if gated; the activation included."""
        key = rows, n, k, gated
        found = self._linears.get(key)
        if found is None:
            found = self._linears[key] = self._linear(*key)
        return found

    def _linear(self, rows: int, n: int, k: int, gated: bool) -> float:
        out = n // 2 if gated else n
        shape = GemmShape(1 if rows == 1 else max(16, next_power_of_2(rows)), out, k, self.itemsize, gated)
        if rows <= MAX_ROWS or (rows == TMA_ROWS and self._tma_tuned(shape)):
            return self._gemv(shape, n) if rows == 1 else self._skinny(shape, n)
        time = self.gemm(rows, n, k)
        if gated and rows < FUSED_GATE_MIN_ROWS:
            time += self.elementwise(rows, n + out)
        return time

    def uses_tma(self, dims: ModelDims) -> bool:
        """Return whether the matmuls of TMA_ROWS rows are the engine's own, and not cuBLAS."""
        return self._tma_tuned(GemmShape(TMA_ROWS, dims.intermediate, dims.hidden_shard, self.itemsize, True))

    def _tma_tuned(self, shape: GemmShape) -> bool:
        return shape in TUNED and self.limits.has_tma

    def _gemv(self, shape: GemmShape, n: int) -> float:
        table = self.table
        # Programs read rows at the same time. Rows that start a large power of two apart use few memory channels.
        stride = shape.k * self.itemsize
        slowdown = 1 + table["gemv_stride"] * ((stride & -stride) / 32768) ** 2
        # Narrow blocks have fewer bytes in flight.
        narrow = max(0.0, 2048 * 2 / (choose_config(shape, self.limits).block_k * self.itemsize) - 1)
        slowdown += table["gemv_narrow"] * min(narrow, 3.0) if shape not in TUNED else 0.0
        return table["gemv_s"] + n * shape.k * self.itemsize * slowdown / (self.read * table["gemv_eff"])

    def _skinny(self, shape: GemmShape, n: int) -> float:
        table, config = self.table, choose_config(shape, self.limits)
        halves = 2 if shape.gated else 1
        programs = cdiv(shape.n, config.n_per_program) * config.split_k
        depth = cdiv(cdiv(shape.k, config.block_k), config.split_k) * config.block_k
        # What an SM loads: weights from memory, inputs from L2.
        loaded = depth * (config.n_per_program * halves + shape.m) * self.itemsize
        sm_eff = table["tma_sm_eff"] if shape.m == TMA_ROWS else table["skinny_sm_eff"]
        sm_rate = sm_eff * self.read / self.limits.num_sms
        read = n * shape.k * self.itemsize / (self.read * table["skinny_eff"])
        time = table["skinny_s"] + table["skinny_row_s"] * shape.m
        time += 0.0 if shape in TUNED else table["skinny_default_s"]
        time += join(read, cdiv(programs, self.limits.num_sms) * loaded / sm_rate)
        if config.split_k > 1:  # the last program of a tile adds the partial sums, in float32
            time += table["split_k_s"] + config.split_k * config.n_per_program * shape.m * 4 * halves / sm_rate
        return time

    def gemm(self, rows: int, n: int, k: int) -> float:
        """A dense matmul by cuBLAS, with the tile and the split of K that take the least time."""
        table, sms = self.table, self.limits.num_sms
        best = math.inf
        for tile_m, tile_n in _GEMM_TILES:
            tiles = cdiv(rows, tile_m) * cdiv(n, tile_n)
            # Small tiles load more inputs for each product.
            cost = tile_m * tile_n * (1 + table["gemm_tile"] * (64 / tile_m + 64 / tile_n - 0.75))
            for split_k in (1, 2, 4) if tiles < sms else (1,):
                waves = cdiv(tiles * split_k, sms)
                depth = k / split_k + table["gemm_depth"] * (1 if split_k == 1 else 2)
                best = min(best, waves * cost * depth)
        compute = 2.0 * best * sms / (self.matmul * table["gemm_eff"])
        bytes_moved = (n * k + rows * k + rows * n) * self.itemsize
        return table["gemm_s"] + join(compute, bytes_moved / (self.read * table["gemm_read_eff"]))

    def decode_attention(
        self, contexts: Sequence[tuple[int, float]], heads: int, kv_heads: int, head_dim: int
    ) -> float:
        """One query for each sequence; `contexts` are (sequences, keys of each)."""
        table = self.table
        total_keys = sum(count * keys for count, keys in contexts)
        if total_keys <= 0:
            return 0.0
        group = max(1, heads // kv_heads)
        target = PROGRAMS_PER_SM * self.limits.num_sms
        longest_merge, padded, longest = 0, 0, 0
        for count, keys in contexts:
            splits, length = plan_splits(keys, total_keys * kv_heads, target)
            padded += count * splits * length
            longest = max(longest, length)
            longest_merge = max(longest_merge, splits if splits > 1 else 0)
        bytes_per_key = 2 * kv_heads * head_dim * self.itemsize
        chunk = max(1, min(32, MERGE_ELEMENTS // (next_power_of_2(group) * max(16, next_power_of_2(head_dim)))))
        read = padded * bytes_per_key / (self.read * table["attention_eff"])
        chain = longest / ATTENTION_BLOCK * table["attention_tile_s"]
        merge = cdiv(longest_merge, chunk) * table["attention_merge_s"]
        if group > 8:  # the partial outputs that a program merges exceed its registers
            merge *= table["attention_merge_wide"]
        return table["attention_s"] + join(read, chain) + merge

    def prefill_attention(self, chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> float:
        """Causal attention of chunks (first position, tokens) over their prompts so far."""
        if not chunks:
            return 0.0
        table, sms = self.table, self.limits.num_sms
        group = max(1, heads // kv_heads)
        queries = max(1, PREFILL_ROWS // group)  # of a tile: its rows are queries times the heads of a group
        # A tile computes whole blocks of keys, and starts and ends in a time worth some further keys.
        extra = table["prefill_attention_keys"]
        work = longest = 0.0
        for first, count in chunks:
            number = cdiv(count, queries)
            work += number * queries * (first + count / 2 + extra)
            longest = max(longest, first + count + extra)
        rate = self.matmul * table["prefill_attention_eff"]
        busy = 4 * heads * head_dim * work / rate
        chain = 4 * queries * group * head_dim * longest / (rate / sms)  # of the longest tile
        return table["prefill_attention_s"] + max(busy, chain)


def plan_splits(keys: float, total_work: float, target_programs: int) -> tuple[int, int]:
    """Return the KV splits of a context and the keys of each, as kernels/kv_splits.py plans them."""
    whole = max(1, round(keys))
    splits = int(whole * target_programs / max(1.0, total_work))
    splits = min(splits, int(math.sqrt(whole * 0.25)))
    splits = max(1, min(splits, cdiv(whole, ATTENTION_BLOCK)))
    length = cdiv(cdiv(whole, splits), ATTENTION_BLOCK) * ATTENTION_BLOCK
    return cdiv(whole, length), length


def join(a: float, b: float, power: float = 4.0) -> float:
    """Return a smooth maximum of two times."""
    return math.pow(math.pow(a, power) + math.pow(b, power), 1 / power)

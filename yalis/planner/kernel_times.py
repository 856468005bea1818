"""Times of single CUDA kernels of the engine, from a roofline with measured efficiencies.

Launch configurations come from the engine itself (kernels/skinny_config.py and the split plan of kernels/kv_splits.py),
so that uneven tiles, split-K and few programs per GPU count as they will run. A kernel takes a fixed time plus the
longer of reading and computing; the two are joined smoothly.

Parameters (efficiencies/h200.json). `_s` are seconds, `_eff` shares of the device's read or matmul rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.skinny_config import MAX_ROWS, TMA_ROWS, TUNED, GemmShape, choose_config, shared_bytes
from yalis.planner.efficiency import Efficiencies

_ATTENTION_BLOCK = 32  # keys of a tile of the decode kernel
_PROGRAMS_PER_SM = 4  # decode attention programs that fill an SM
_MERGE_ELEMENTS = 4096
#: Tiles that cuBLAS chooses from, rows x columns, and the share of the matmul rate that a wave of them reaches.
_GEMM_TILES = ((256, 128), (128, 256), (192, 192), (128, 128), (128, 64), (64, 128), (64, 64))
_FUSED_GATE_MIN_ROWS = 8192  # kernels/ops.py


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of kernels on a GPU with these rates."""

    table: Efficiencies
    read: float  # bytes/s
    matmul: float  # FLOP/s
    limits: GpuLimits
    itemsize: int

    def elementwise(self, rows: int, read_width: float, write_width: float) -> float:
        """An element-wise or norm kernel with one program per row."""
        table = self.table
        bytes_moved = rows * (read_width + write_width) * self.itemsize
        latency = table["row_s"] * (read_width + write_width) * self.itemsize / 32768
        return table["kernel_s"] + latency + bytes_moved / (self.read * table["elementwise_eff"])

    def linear(self, rows: int, n: int, k: int, gated: bool = False) -> float:
        """x[rows, k] weight[n, k]^T, with n the rows of gate and up together if gated; the activation included."""
        out = n // 2 if gated else n
        shape = GemmShape(1 if rows == 1 else max(16, next_power_of_2(rows)), out, k, self.itemsize, gated)
        if rows <= MAX_ROWS or (rows == TMA_ROWS and shape in TUNED and self.limits.has_tma):
            return self._gemv(shape, n) if rows == 1 else self._skinny(shape, n)
        time = self.gemm(rows, n, k)
        if gated and rows < _FUSED_GATE_MIN_ROWS:
            time += self.elementwise(rows, n, out)
        return time

    def _gemv(self, shape: GemmShape, n: int) -> float:
        table = self.table
        slowdown = 1 + table["gemv_wide"] * (shape.k / 16384) ** 2
        return table["gemv_s"] + n * shape.k * self.itemsize * slowdown / (self.read * table["gemv_eff"])

    def _skinny(self, shape: GemmShape, n: int) -> float:
        table, config = self.table, choose_config(shape, self.limits)
        weight_rows = config.n_per_program * (2 if shape.gated else 1)
        tiles = cdiv(shape.n, config.n_per_program)
        programs = tiles * config.split_k
        depth = cdiv(cdiv(shape.k, config.block_k), config.split_k) * config.block_k
        # What an SM must load: weights from memory, inputs from L2.
        loaded = depth * (weight_rows + shape.m) * self.itemsize
        resident = max(1, (self.limits.max_shared_memory + 1024) // max(1, shared_bytes(shape, config)))
        waves = cdiv(programs, self.limits.num_sms * resident)
        per_sm = cdiv(programs, self.limits.num_sms)
        read = n * shape.k * self.itemsize / (self.read * table["skinny_eff"])
        sm_rate = table["skinny_sm_eff"] * self.read / self.limits.num_sms
        streamed = per_sm * loaded / sm_rate
        time = table["skinny_s"] + waves * 0.0 + _join(read, streamed)
        if config.split_k > 1:
            partial = config.split_k * config.n_per_program * shape.m * 4 * (2 if shape.gated else 1)
            time += table["split_k_s"] + partial / sm_rate
        return time

    def gemm(self, rows: int, n: int, k: int) -> float:
        """A dense matmul by cuBLAS."""
        table = self.table
        work = min(
            cdiv(cdiv(rows, tile_m) * cdiv(n, tile_n), self.limits.num_sms)
            * tile_m * tile_n * self._tile_cost(tile_m, tile_n)
            for tile_m, tile_n in _GEMM_TILES
        )  # fmt: skip
        flops = 2.0 * work * self.limits.num_sms * (k + table["gemm_depth"])
        bytes_moved = (n * k + rows * k + rows * n) * self.itemsize
        compute = flops / (self.matmul * table["gemm_eff"])
        read = bytes_moved / (self.read * table["gemm_read_eff"])
        return table["gemm_s"] + _join(compute, read)

    def _tile_cost(self, tile_m: int, tile_n: int) -> float:
        """Relative cost of an element of a tile: small tiles load more inputs for each product."""
        return 1 + self.table["gemm_tile"] * (1 / tile_m + 1 / tile_n - 2 / 192) * 64

    def decode_attention(
        self, contexts: Sequence[tuple[int, float]], heads: int, kv_heads: int, head_dim: int
    ) -> float:
        """One query for each sequence; `contexts` are (sequences, keys of each)."""
        table = self.table
        total_keys = sum(count * keys for count, keys in contexts)
        if total_keys <= 0:
            return 0.0
        group = max(1, heads // kv_heads)
        target = _PROGRAMS_PER_SM * self.limits.num_sms
        longest_merge = padded = longest = 0.0
        programs = 0
        for count, keys in contexts:
            splits, length = plan_splits(keys, total_keys * kv_heads, target)
            padded += count * splits * length
            programs += count * splits * kv_heads
            longest = max(longest, length)
            longest_merge = max(longest_merge, splits if splits > 1 else 0)
        bytes_per_key = 2 * kv_heads * head_dim * self.itemsize
        chunk = max(1, min(32, _MERGE_ELEMENTS // (next_power_of_2(group) * max(16, next_power_of_2(head_dim)))))
        read = padded * bytes_per_key / (self.read * table["attention_eff"])
        chain = longest / _ATTENTION_BLOCK * table["attention_tile_s"]
        merge = cdiv(int(longest_merge), chunk) * table["attention_merge_s"]
        return table["attention_s"] + _join(read, chain) + merge

    def prefill_attention(self, chunks: Sequence[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> float:
        """Causal attention of chunks (first position, tokens) over their prompts so far."""
        if not chunks:
            return 0.0
        table = self.table
        pairs = sum(count * (first + (count + 1) / 2) for first, count in chunks)
        queries = max(1, 128 // max(1, heads // kv_heads))
        # A tile of `queries` tokens visits whole blocks of 64 keys, half a tile too many in the mean.
        extra = sum(count * (queries + 64) / 2 for _, count in chunks)
        flops = 4 * heads * head_dim * (pairs + extra)
        tiles = sum(cdiv(count, queries) for _, count in chunks) * kv_heads
        fill = min(1.0, tiles / self.limits.num_sms)
        longest = max(first + count for first, count in chunks)
        floor = 4 * 128 * head_dim * longest / (self.matmul / self.limits.num_sms)
        compute = max(flops / (self.matmul * max(fill, 1e-9)), floor) / table["prefill_attention_eff"]
        return table["prefill_attention_s"] + compute


def plan_splits(keys: float, total_work: float, target_programs: int) -> tuple[int, int]:
    """Return the KV splits of a context and the keys of each, as kernels/kv_splits.py plans them."""
    whole = max(1, round(keys))
    splits = int(whole * target_programs / max(1.0, total_work))
    splits = min(splits, int(math.sqrt(whole * 0.25)))
    splits = max(1, min(splits, cdiv(whole, _ATTENTION_BLOCK)))
    length = cdiv(cdiv(whole, splits), _ATTENTION_BLOCK) * _ATTENTION_BLOCK
    return cdiv(whole, length), length


def _join(a: float, b: float, power: float = 4.0) -> float:
    """Return a smooth maximum of two times."""
    return math.pow(math.pow(a, power) + math.pow(b, power), 1 / power)

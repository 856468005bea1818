// Epilogue fused into the all-reduce of a layer: the residual addition and the RMSNorm before the next layer.
#pragma once
#include "operation.h"

namespace nvrar {

// Barrier of all blocks of this rank. Afterwards, each block sees the writes of all others.
template <class Op> NVRAR_DEVICE void grid_barrier(Op& op) {
  op.transport.sync();
  if (op.transport.thread() == 0) {
    uint32_t before = op.transport.load_generation(&op.state->barrier_generation);
    if (op.transport.fetch_increment(&op.state->blocks_at_barrier) == uint32_t(op.transport.blocks()) - 1) {
      op.state->blocks_at_barrier = 0;
      op.transport.advance_generation(&op.state->barrier_generation);
    } else {
      op.wait_until(WaitSite{kEpilogue, 0, -1},
                    [&] { return op.transport.load_generation(&op.state->barrier_generation) != before; });
    }
  }
  op.transport.sync();
}

// summed = residual + out, rounded; normed = summed / rms(summed) * weight, computed in fp32. A block handles whole
// rows, so the bits of a row depend on the number of threads, not on the number of blocks.
template <class Value, class Transport> NVRAR_DEVICE void add_and_norm(Transport& transport, const KernelArgs& args) {
  constexpr int n = kPackElements<Value>;
  uint32_t packs = (args.width + n - 1) / n, first = transport.thread(), stride = transport.threads();
  for (uint32_t row = transport.block(); row < args.rows; row += transport.blocks()) {
    uint64_t start = uint64_t(row) * args.width * sizeof(typename Value::Bits);
    const char* sums = static_cast<const char*>(args.out) + start;
    const char* residual = static_cast<const char*>(args.residual) + start;
    char* summed = static_cast<char*>(args.summed) + start;
    char* normed = static_cast<char*>(args.normed) + start;
    float squares = 0;
    for (uint32_t index = first; index < packs; index += stride) {
      Accumulator<Value> sum(load_pack<Value>(residual, args.width, args.rows_aligned, index));
      sum.add(load_pack<Value>(sums, args.width, args.rows_aligned, index));
      Pack rounded = sum.round();
      store_pack<Value>(summed, args.width, args.rows_aligned, index, rounded);
      Accumulator<Value> kept(rounded); // zero beyond the end of the row
#pragma unroll
      for (int i = 0; i < n; ++i) squares += kept.element[i] * kept.element[i];
    }
    float scale = transport.rsqrt(transport.block_sum(squares) / args.width + args.eps);
    for (uint32_t index = first; index < packs; index += stride) {
      Accumulator<Value> value(load_pack<Value>(summed, args.width, args.rows_aligned, index));
      Accumulator<Value> weight;
      if (args.fp32_weight) {
        const float* weights = static_cast<const float*>(args.weight);
#pragma unroll
        for (int i = 0; i < n; ++i) weight.element[i] = index * n + i < args.width ? weights[index * n + i] : 0;
      } else {
        weight = Accumulator<Value>(load_pack<Value>(args.weight, args.width, args.rows_aligned, index));
      }
#pragma unroll
      for (int i = 0; i < n; ++i) value.element[i] = value.element[i] * scale * weight.element[i];
      store_pack<Value>(normed, args.width, args.rows_aligned, index, value.round());
    }
  }
}

} // namespace nvrar

// What usually follows the all-reduce of a layer: the residual sum and the norm before the next layer.
#pragma once
#include "operation.h"

namespace nvrar {

// The blocks of this rank meet: what each has written, all may read.
template <class Op> NVRAR_DEVICE void meet(Op& op) {
  op.wire.sync();
  if (op.wire.thread() == 0) {
    uint32_t before = op.wire.generation(&op.state->generation);
    if (op.wire.count(&op.state->arrived) == uint32_t(op.wire.blocks()) - 1) {
      op.state->arrived = 0;
      op.wire.wake(&op.state->generation);
    } else {
      op.await(Site{kEpilogue, 0, -1}, [&] { return op.wire.generation(&op.state->generation) != before; });
    }
  }
  op.wire.sync();
}

// residual += out, rounded; normed = residual / rms(residual) * weight, computed in fp32. A block takes whole rows.
template <class Op> NVRAR_DEVICE void add_and_norm(Op& op) {
  using Value = typename Op::Value;
  constexpr int n = kElements<Value>;
  const Call& call = op.call;
  uint32_t units = (call.width + n - 1) / n, first = op.wire.thread(), stride = op.wire.threads();
  for (uint32_t row = op.wire.block(); row < call.rows; row += op.wire.blocks()) {
    uint64_t start = uint64_t(row) * call.width * sizeof(typename Value::Bits);
    const char* sums = static_cast<const char*>(call.out) + start;
    char* residual = static_cast<char*>(call.residual) + start;
    char* normed = static_cast<char*>(call.normed) + start;
    float squares = 0;
    for (uint32_t at = first; at < units; at += stride) {
      Wide<Value> sum(load_unit<Value>(residual, call.width, call.packed, at));
      sum.add(load_unit<Value>(sums, call.width, call.packed, at));
      Unit rounded = sum.narrow();
      store_unit<Value>(residual, call.width, call.packed, at, rounded);
      Wide<Value> kept(rounded); // zero behind the end of the row
#pragma unroll
      for (int i = 0; i < n; ++i) squares += kept.element[i] * kept.element[i];
    }
    float scale = op.wire.rsqrt(op.wire.sum(squares) / call.width + call.eps);
    for (uint32_t at = first; at < units; at += stride) {
      Wide<Value> value(load_unit<Value>(residual, call.width, call.packed, at));
      Wide<Value> weight;
      if (call.wide_weight) {
        const float* weights = static_cast<const float*>(call.weight);
#pragma unroll
        for (int i = 0; i < n; ++i) weight.element[i] = at * n + i < call.width ? weights[at * n + i] : 0;
      } else {
        weight = Wide<Value>(load_unit<Value>(call.weight, call.width, call.packed, at));
      }
#pragma unroll
      for (int i = 0; i < n; ++i) value.element[i] = value.element[i] * scale * weight.element[i];
      store_unit<Value>(normed, call.width, call.packed, at, value.narrow());
    }
  }
}

} // namespace nvrar

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
  using Bits = typename Value::Bits;
  const Call& call = op.call;
  for (uint32_t row = op.wire.block(); row < call.rows; row += op.wire.blocks()) {
    uint64_t start = uint64_t(row) * call.width;
    const Bits* sums = static_cast<const Bits*>(call.out) + start;
    Bits* residual = static_cast<Bits*>(call.residual) + start;
    Bits* normed = static_cast<Bits*>(call.normed) + start;
    float squares = 0;
    for (uint32_t i = op.wire.thread(); i < call.width; i += op.wire.threads()) {
      residual[i] = Value::narrow(Value::widen(residual[i]) + Value::widen(op.wire.load_shared(sums + i)));
      float value = Value::widen(residual[i]);
      squares += value * value;
    }
    float scale = op.wire.rsqrt(op.wire.sum(squares) / call.width + call.eps);
    for (uint32_t i = op.wire.thread(); i < call.width; i += op.wire.threads()) {
      float weight = call.wide_weight ? static_cast<const float*>(call.weight)[i]
                                      : Value::widen(static_cast<const Bits*>(call.weight)[i]);
      normed[i] = Value::narrow(Value::widen(residual[i]) * scale * weight);
    }
  }
}

} // namespace nvrar

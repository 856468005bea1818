// What NVRAR is measured against, on the same words, puts and launches: a flat ring and a flat one-shot exchange.
// For benchmarks; the engine does not use them.
#pragma once
#include "protocol.h"

namespace nvrar {

constexpr int kMaxFlat = 64;

struct FlatGroup {
  int32_t id, rank, size;
  int32_t pe[kMaxFlat];    // each member's rank in the world
  char* remote[kMaxFlat];  // its memory, as a symmetric address
  char* self;
  uint64_t slot;           // bytes
  State* state;
  Status* status;
  uint64_t timeout;

  // For each parity: a slot to receive in for each step of the ring (or for each rank), and one to send from.
  NVRAR_SHARED int steps() const { return 2 * (size - 1) > size ? 2 * (size - 1) : size; }
  NVRAR_SHARED uint64_t receive(int parity, int step) const { return uint64_t(parity * 2 * steps() + step) * slot; }
  NVRAR_SHARED uint64_t stage(int parity, int step) const { return receive(parity, steps() + step); }
  NVRAR_SHARED uint64_t bytes() const { return 4 * uint64_t(steps()) * slot; }
};

// Every rank sends its message to every other, and sums all in order of rank.
template <class Value, class Wire> NVRAR_DEVICE void one_shot(Wire& wire, const FlatGroup& group, const Call& call) {
  Operation<Wire, Value> op(wire, call, group.state, group.status, group.timeout, group.id);
  Span all{0, call.units};
  char* stage = group.self + group.stage(op.parity, 0);
  op.each_chunk(all, [&](Chunk chunk) {
    op.each_batch(chunk, [&](Batch batch) {
      Unit units[kBatch];
      op.load(all, batch, units);
      Words::write(op, stage, batch, units);
    });
    for (int turn = 1; turn < group.size; ++turn) {
      int peer = (group.rank + turn) % group.size;
      Words::put(op, group.remote[peer] + group.receive(op.parity, group.rank), stage, chunk, nullptr, group.pe[peer]);
    }
  });
  op.each_chunk(all, [&](Chunk chunk) {
    op.each_batch(chunk, [&](Batch batch) {
      Wide<Value> sums[kBatch];
      for (int source = 0; source < group.size; ++source) {
        Unit units[kBatch] = {};
        const char* slot = source == group.rank ? stage : group.self + group.receive(op.parity, source);
        Words::read(op, slot, batch, units, Site{kFlat, source, group.pe[source]});
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (source == 0) {
            sums[k] = Wide<Value>(units[k]);
          } else {
            sums[k].add(units[k]);
          }
        }
      }
      Unit rounded[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) rounded[k] = sums[k].narrow();
      op.store(all, batch, rounded);
    });
  });
  op.finish();
}

// Pieces go around, gathering sums, and then around once more.
template <class Value, class Wire> NVRAR_DEVICE void ring(Wire& wire, const FlatGroup& group, const Call& call) {
  Operation<Wire, Value> op(wire, call, group.state, group.status, group.timeout, group.id);
  int size = group.size, next = (group.rank + 1) % size, before = (group.rank + size - 1) % size;
  int steps = 2 * (size - 1);
  auto send = [&](int step, Chunk chunk) {
    Words::put(op, group.remote[next] + group.receive(op.parity, step), group.self + group.stage(op.parity, step),
               chunk, nullptr, group.pe[next]);
  };
  Span own = piece_of(call.units, size, group.rank);
  op.each_chunk(own, [&](Chunk chunk) {
    op.each_batch(chunk, [&](Batch batch) {
      Unit units[kBatch];
      op.load(own, batch, units);
      Words::write(op, group.self + group.stage(op.parity, 0), batch, units);
    });
    send(0, chunk);
  });
  for (int step = 0; step < steps; ++step) {
    Span piece = piece_of(call.units, size, (group.rank + 2 * size - 1 - step) % size);
    op.each_chunk(piece, [&](Chunk chunk) {
      op.each_batch(chunk, [&](Batch batch) {
        Unit units[kBatch] = {};
        Words::read(op, group.self + group.receive(op.parity, step), batch, units,
                    Site{kFlat, step, group.pe[before]});
        if (step < size - 1) {
          Unit mine[kBatch] = {};
          op.load(piece, batch, mine);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            Wide<Value> sum(units[k]);
            sum.add(mine[k]);
            units[k] = sum.narrow();
          }
        }
        if (step >= size - 2) op.store(piece, batch, units);
        if (step + 1 < steps) Words::write(op, group.self + group.stage(op.parity, step + 1), batch, units);
      });
      if (step + 1 < steps) send(step + 1, chunk);
    });
  }
  op.finish();
}

} // namespace nvrar

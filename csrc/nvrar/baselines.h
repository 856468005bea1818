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

  int32_t receives, stages; // slots of each parity

  NVRAR_SHARED uint64_t receive(int parity, int step) const {
    return uint64_t(parity * (receives + stages) + step) * slot;
  }
  NVRAR_SHARED uint64_t stage(int parity, int step) const { return receive(parity, receives + step); }
  NVRAR_SHARED uint64_t bytes() const { return receive(2, 0); }
};

enum Algorithm { kRing = 1, kOneShot = 2 };

// In how many pieces a message is summed.
NVRAR_SHARED int flat_owners(int algorithm, int size) { return algorithm == kRing ? size : 1; }

// Fills in what a group of this size needs for messages of up to `capacity` bytes.
inline void shape_flat(FlatGroup& group, int algorithm, int size, uint64_t capacity) {
  int owners = flat_owners(algorithm, size);
  uint64_t units = (capacity + kUnit - 1) / kUnit;
  group.size = size;
  group.slot = (units + owners - 1) / owners * Words::kWireUnit;
  group.receives = algorithm == kRing ? 2 * (size - 1) : size;
  group.stages = algorithm == kRing ? 2 * (size - 1) : 1;
}

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

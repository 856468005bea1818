// Baselines for benchmarks, on the same LL protocol, transport and launch parameters: a flat ring and a flat one-shot
// all-reduce ("flat": every message is a put, whether the ranks share a node or not). The engine does not use them.
#pragma once
#include "protocol.h"

namespace nvrar {

constexpr int kMaxFlat = 64;

struct FlatGroup {
  int32_t id, rank, size;
  int32_t pe[kMaxFlat];          // PE of each member
  char* remote_memory[kMaxFlat]; // group memory of each member, as a symmetric address
  char* own_memory;
  uint64_t slot_bytes;
  GroupState* state;
  Status* status;
  uint64_t timeout;
  int32_t host_heap;

  int32_t receives, stages; // receive and stage slots per parity

  NVRAR_SHARED uint64_t receive(int parity, int step) const {
    return uint64_t(parity * (receives + stages) + step) * slot_bytes;
  }
  NVRAR_SHARED uint64_t stage(int parity, int step) const { return receive(parity, receives + step); }
  NVRAR_SHARED uint64_t bytes() const { return receive(2, 0); }
};

enum Algorithm { kRing = 1, kOneShot = 2 };

// The number of shards that a message is reduced in.
NVRAR_SHARED int flat_shards(int algorithm, int size) { return algorithm == kRing ? size : 1; }

// Fills in the layout of a group of `size` ranks, for operations of up to `capacity` bytes.
inline void init_flat_layout(FlatGroup& group, int algorithm, int size, uint64_t capacity) {
  int shards = flat_shards(algorithm, size);
  uint64_t packs = (capacity + kPackBytes - 1) / kPackBytes;
  group.size = size;
  group.slot_bytes = (packs + shards - 1) / shards * LLProtocol::kSlotPackBytes;
  group.receives = algorithm == kRing ? 2 * (size - 1) : size;
  group.stages = algorithm == kRing ? 2 * (size - 1) : 1;
}

// Every rank sends its whole message to every other rank and adds all of them in rank order.
template <class Value, class Transport>
NVRAR_DEVICE void one_shot(Transport& transport, const FlatGroup& group, const KernelArgs& args) {
  Operation<Transport, Value> op(transport, args, group.state, group.status, group.timeout, group.id);
  Span all{0, args.packs};
  char* stage = group.own_memory + group.stage(op.parity, 0);
  op.for_each_chunk(all, [&](Chunk chunk) {
    op.for_each_batch(chunk, [&](Batch batch) {
      Pack packs[kBatch];
      op.load(all, batch, packs);
      LLProtocol::write(op, stage, batch, packs);
    });
    for (int turn = 1; turn < group.size; ++turn) {
      int peer = (group.rank + turn) % group.size;
      char* slot = group.remote_memory[peer] + group.receive(op.parity, group.rank);
      LLProtocol::put(op, slot, stage, chunk, nullptr, group.pe[peer]);
    }
  });
  op.for_each_chunk(all, [&](Chunk chunk) {
    op.for_each_batch(chunk, [&](Batch batch) {
      Accumulator<Value> sums[kBatch];
      for (int source = 0; source < group.size; ++source) {
        Pack packs[kBatch] = {};
        const char* slot = source == group.rank ? stage : group.own_memory + group.receive(op.parity, source);
        LLProtocol::read(op, slot, batch, packs, WaitSite{kBaseline, source, group.pe[source]});
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (source == 0) {
            sums[k] = Accumulator<Value>(packs[k]);
          } else {
            sums[k].add(packs[k]);
          }
        }
      }
      Pack rounded[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) rounded[k] = sums[k].round();
      op.store(all, batch, rounded);
    });
  });
  op.finish();
}

// Shards pass around the ring twice: a reduce-scatter, then an all-gather.
template <class Value, class Transport>
NVRAR_DEVICE void ring(Transport& transport, const FlatGroup& group, const KernelArgs& args) {
  Operation<Transport, Value> op(transport, args, group.state, group.status, group.timeout, group.id);
  int size = group.size, next = (group.rank + 1) % size, previous = (group.rank + size - 1) % size;
  int steps = 2 * (size - 1);
  auto send = [&](int step, Chunk chunk) {
    LLProtocol::put(op, group.remote_memory[next] + group.receive(op.parity, step),
                    group.own_memory + group.stage(op.parity, step), chunk, nullptr, group.pe[next]);
  };
  Span own = shard_span(args.packs, size, group.rank);
  op.for_each_chunk(own, [&](Chunk chunk) {
    op.for_each_batch(chunk, [&](Batch batch) {
      Pack packs[kBatch];
      op.load(own, batch, packs);
      LLProtocol::write(op, group.own_memory + group.stage(op.parity, 0), batch, packs);
    });
    send(0, chunk);
  });
  for (int step = 0; step < steps; ++step) {
    Span shard = shard_span(args.packs, size, (group.rank + 2 * size - 1 - step) % size);
    op.for_each_chunk(shard, [&](Chunk chunk) {
      op.for_each_batch(chunk, [&](Batch batch) {
        Pack packs[kBatch] = {};
        LLProtocol::read(op, group.own_memory + group.receive(op.parity, step), batch, packs,
                         WaitSite{kBaseline, step, group.pe[previous]});
        if (step < size - 1) {
          Pack local[kBatch] = {};
          op.load(shard, batch, local);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            Accumulator<Value> sum(packs[k]);
            sum.add(local[k]);
            packs[k] = sum.round();
          }
        }
        if (step >= size - 2) op.store(shard, batch, packs);
        if (step + 1 < steps) LLProtocol::write(op, group.own_memory + group.stage(op.parity, step + 1), batch, packs);
      });
      if (step + 1 < steps) send(step + 1, chunk);
    });
  }
  op.finish();
}

} // namespace nvrar

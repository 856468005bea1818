// Intra-node phases, with direct loads and stores to the memory of the other ranks of the node: the reduce-scatter
// (scatter_inputs, reduce_shard) and the all-gather (store_result, signal_result, gather_shards).
#pragma once
#include "protocol.h"

namespace nvrar {

// Writes this rank's input to the owner of each shard.
template <class Protocol, class Op> NVRAR_DEVICE void scatter_inputs(Op& op, const Group& group) {
  const Region& region = Protocol::region(group);
  int slot = region.reduce_slot(group.local_rank);
  for (int turn = 0; turn < group.shards; ++turn) {
    int owner = (group.local_rank + turn) % group.shards; // ranks start with different owners
    if (owner == group.local_rank) continue;
    Span shard = shard_span(op.args.packs, group.shards, owner);
    op.for_each_chunk(shard, [&](Chunk chunk) {
      op.for_each_batch(chunk, [&](Batch batch) {
        Pack packs[kBatch];
        op.load(shard, batch, packs);
        Protocol::write(op, group.peer_memory[owner] + region.data_offset(op.parity, slot), batch, packs);
      });
      Protocol::signal_peers(op, 1, [&](int) {
        char* signal = group.peer_memory[owner] + region.signal_offset(op.parity, slot, chunk.index);
        return reinterpret_cast<uint64_t*>(signal);
      });
    });
  }
}

// Owner: adds the inputs of the node's ranks to its shard, in rank order. Calls `on_batch` with each reduced batch and
// `on_chunk` after each reduced chunk.
template <class Protocol, class Op, class OnBatch, class OnChunk>
NVRAR_DEVICE void reduce_shard(Op& op, const Group& group, Span shard, OnBatch on_batch, OnChunk on_chunk) {
  const Region& region = Protocol::region(group);
  op.for_each_chunk(shard, [&](Chunk chunk) {
    Protocol::wait_signals(op, group.local_size, [&](int source) {
      char* signal = group.own_memory + region.signal_offset(op.parity, region.reduce_slot(source), chunk.index);
      return SignalWait{source == group.local_rank ? nullptr : reinterpret_cast<uint64_t*>(signal),
                        WaitSite{kReduceScatter, 0, group.local_pe[source]}, false};
    });
    op.for_each_batch(chunk, [&](Batch batch) {
      Accumulator<typename Op::Value> sums[kBatch];
      for (int source = 0; source < group.local_size; ++source) {
        Pack packs[kBatch] = {};
        if (source == group.local_rank) {
          op.load(shard, batch, packs);
        } else {
          const char* slot = group.own_memory + region.data_offset(op.parity, region.reduce_slot(source));
          Protocol::read(op, slot, batch, packs, WaitSite{kReduceScatter, 0, group.local_pe[source]});
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (source == 0) {
            sums[k] = Accumulator<typename Op::Value>(packs[k]);
          } else {
            sums[k].add(packs[k]);
          }
        }
      }
      Pack rounded[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) rounded[k] = sums[k].round();
      on_batch(batch, rounded);
    });
    on_chunk(chunk);
  });
}

// One shot, for short messages within one node: every rank writes its whole input to every other rank, and adds all of
// them in rank order. One step instead of two, and the same additions, so the results have the same bits. An input has
// to fit into the slot of one shard.
template <class Protocol, class Op> NVRAR_DEVICE void one_shot_in_node(Op& op, const Group& group) {
  const Region& region = Protocol::region(group);
  Span all{0, op.args.packs};
  int slot = region.reduce_slot(group.local_rank);
  op.for_each_chunk(all, [&](Chunk chunk) {
    op.for_each_batch(chunk, [&](Batch batch) {
      Pack packs[kBatch];
      op.load(all, batch, packs);
      for (int turn = 1; turn < group.local_size; ++turn) {
        int peer = (group.local_rank + turn) % group.local_size;
        Protocol::write(op, group.peer_memory[peer] + region.data_offset(op.parity, slot), batch, packs);
      }
    });
    Protocol::signal_peers(op, group.local_size, [&](int peer) {
      char* signal = group.peer_memory[peer] + region.signal_offset(op.parity, slot, chunk.index);
      return peer == group.local_rank ? nullptr : reinterpret_cast<uint64_t*>(signal);
    });
  });
  reduce_shard<Protocol>(
      op, group, all, [&](Batch batch, const Pack(&packs)[kBatch]) { op.store(all, batch, packs); }, [](Chunk) {});
}

// Owner: stores a batch of its finished shard to its own output and to the other ranks of its node.
template <class Protocol, class Op>
NVRAR_DEVICE void store_result(Op& op, const Group& group, Span shard, Batch batch, const Pack (&packs)[kBatch]) {
  const Region& region = Protocol::region(group);
  op.store(shard, batch, packs);
  for (int turn = 1; turn < group.local_size; ++turn) {
    int peer = (group.local_rank + turn) % group.local_size;
    char* slot = group.peer_memory[peer] + region.data_offset(op.parity, region.gather_slot(group.local_rank));
    Protocol::write(op, slot, batch, packs);
  }
}

// Owner: signals the other ranks of its node that a chunk of its finished shard is there.
template <class Protocol, class Op> NVRAR_DEVICE void signal_result(Op& op, const Group& group, Chunk chunk) {
  const Region& region = Protocol::region(group);
  Protocol::signal_peers(op, group.local_size, [&](int peer) {
    uint64_t offset = region.signal_offset(op.parity, region.gather_slot(group.local_rank), chunk.index);
    return peer == group.local_rank ? nullptr : reinterpret_cast<uint64_t*>(group.peer_memory[peer] + offset);
  });
}

// Copies the finished shards of the other owners to the output.
template <class Protocol, class Op> NVRAR_DEVICE void gather_shards(Op& op, const Group& group) {
  const Region& region = Protocol::region(group);
  for (int turn = 0; turn < group.shards; ++turn) {
    int owner = (group.local_rank + turn) % group.shards;
    if (owner == group.local_rank) continue;
    Span shard = shard_span(op.args.packs, group.shards, owner);
    int slot = region.gather_slot(owner);
    WaitSite site{kAllGather, 0, group.local_pe[owner]};
    op.for_each_chunk(shard, [&](Chunk chunk) {
      Protocol::wait_signals(op, 1, [&](int) {
        char* signal = group.own_memory + region.signal_offset(op.parity, slot, chunk.index);
        return SignalWait{reinterpret_cast<uint64_t*>(signal), site, false};
      });
      op.for_each_batch(chunk, [&](Batch batch) {
        Pack packs[kBatch];
        Protocol::read(op, group.own_memory + region.data_offset(op.parity, slot), batch, packs, site);
        op.store(shard, batch, packs);
      });
    });
  }
}

} // namespace nvrar

// NVRAR: a hierarchical all-reduce in one kernel.
//
// 1. Intra-node reduce-scatter (intra_node.h): every rank writes its input to the owner of each shard of its node. The
//    owner adds the inputs in rank order.
// 2. Inter-node recursive doubling (inter_node.h): the owners of the same shard on all nodes exchange partial sums with
//    partners at distance 1, 2, 4, ... and add them. Or recursive halving: fewer bytes, twice the rounds.
// 3. Intra-node all-gather (intra_node.h): every owner writes its finished shard to the other ranks of its node.
//
// There are as many shards as the smallest node has ranks. On larger nodes, the other ranks own no shard: they only
// contribute inputs and receive results.
//
// Receivers do not acknowledge buffers. A rank that has finished operation k - 1 has used an input of every rank to it,
// so every rank has entered k - 1 and finished k - 2. The buffers of k - 2 are therefore free for operation k, and two
// sets, selected by the parity of the sequence number, are enough. This requires that the result of every operation
// depends on every rank. It does for any message of at least one element, because its first shard is not empty.
#pragma once
#include "epilogue.h"
#include "inter_node.h"
#include "intra_node.h"

namespace nvrar {

template <class Protocol, Schedule schedule, class Op> NVRAR_DEVICE void three_phases(Op& op, const Group& group) {
  using InNode = typename Protocol::InNode;
  scatter_inputs<InNode>(op, group);
  if (group.local_rank < group.shards) {
    Span shard = shard_span(op.args.packs, group.shards, group.local_rank);
    auto publish = [&](Batch batch, const Pack(&packs)[kBatch]) {
      store_result<InNode>(op, group, shard, batch, packs);
    };
    auto signal = [&](Chunk chunk) { signal_result<InNode>(op, group, chunk); };
    if (group.inter_steps == 0) {
      reduce_shard<InNode>(op, group, shard, publish, signal);
    } else {
      const Region& region = Protocol::region(group);
      const InterStep& first = group.inter_step[0];
      char* stage = group.own_memory + region.data_offset(op.parity, region.stage_slot(first.slot));
      // With halving, the first partner gets half of the chunks. A folded node (no rounds) sends and receives all.
      bool halving = schedule == kHalving && group.rounds > 0;
      ChunkRange sent = op.chunks_of(shard);
      if (halving && group.first_round == 0) sent = sent.half(!first.keeps_upper);
      reduce_shard<InNode>(
          op, group, shard,
          [&](Batch batch, const Pack(&packs)[kBatch]) { Protocol::write(op, stage, batch, packs); },
          [&](Chunk chunk) {
            if (sent.has(chunk.index)) send_chunk<Protocol>(op, group, first, first, chunk);
          });
      if constexpr (schedule == kHalving) {
        if (halving) exchange_halves<Protocol>(op, group, shard, publish, signal);
      }
      if (!halving) exchange_shard<Protocol>(op, group, shard, publish, signal);
    }
  }
  gather_shards<InNode>(op, group);
}

// `schedule` is the same on all ranks. kOneShotInNode: one_shot_in_node() of intra_node.h instead of phases 1 to 3.
template <class Value, class Protocol, Schedule schedule, class Transport>
NVRAR_DEVICE void all_reduce(Transport& transport, const Group& group, const KernelArgs& args) {
  Operation<Transport, Value> op(transport, args, group.state, group.status, group.timeout, group.id);
  if constexpr (schedule == kOneShotInNode) {
    one_shot_in_node<typename Protocol::InNode>(op, group);
  } else {
    three_phases<Protocol, schedule>(op, group);
  }
  if (args.rows) {
    grid_barrier(op);
    add_and_norm<Value>(transport, args);
  }
  op.finish();
}

} // namespace nvrar

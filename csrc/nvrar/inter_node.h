// Inter-node phase: recursive doubling among the owners of the same shard, with puts and signals only.
// Never load from or store to another rank's memory here. It works on one GPU, but not over a network.
#pragma once
#include "protocol.h"

namespace nvrar {

// Sends a chunk from the stage slot. Each chunk is its own put, so the next one is added while this one is in flight.
template <class Protocol, class Op>
NVRAR_DEVICE void send_chunk(Op& op, const Group& group, const InterStep& step, Chunk chunk) {
  if (step.send_to < 0) return;
  const Region& region = Protocol::region(group);
  uint64_t receive = region.data_offset(op.parity, region.receive_slot(step.slot));
  uint64_t stage = region.data_offset(op.parity, region.stage_slot(step.slot));
  uint64_t signal = region.signal_offset(op.parity, region.receive_slot(step.slot), chunk.index);
  Protocol::put(op, step.remote_memory + receive, group.own_memory + stage, chunk,
                reinterpret_cast<uint64_t*>(step.remote_memory + signal), step.send_to);
}

// Runs all inter-node steps of a shard whose chunks are already staged and sent for the first step. Calls `on_batch`
// with each finished batch and `on_chunk` after each finished chunk.
//
// The term added for this rank is read back from the stage slot, that is, rounded to the dtype that was sent. So both
// partners of an exchange add the same two numbers and get the same bits.
template <class Protocol, class Op, class OnBatch, class OnChunk>
NVRAR_DEVICE void exchange_shard(Op& op, const Group& group, Span shard, OnBatch on_batch, OnChunk on_chunk) {
  const Region& region = Protocol::region(group);
  for (int i = 0; i < group.inter_steps; ++i) {
    const InterStep& step = group.inter_step[i];
    bool last = i + 1 == group.inter_steps;
    WaitSite site{kInterNode, i, step.receive_from};
    const char* stage = group.own_memory + region.data_offset(op.parity, region.stage_slot(step.slot));
    const char* receive = group.own_memory + region.data_offset(op.parity, region.receive_slot(step.slot));
    char* next_stage =
        last ? nullptr
             : group.own_memory + region.data_offset(op.parity, region.stage_slot(group.inter_step[i + 1].slot));
    op.for_each_chunk(shard, [&](Chunk chunk) {
      if (step.receive_from >= 0) {
        Protocol::wait_signals(op, 1, [&](int) {
          char* signal =
              group.own_memory + region.signal_offset(op.parity, region.receive_slot(step.slot), chunk.index);
          return SignalWait{reinterpret_cast<uint64_t*>(signal), site, true};
        });
      }
      op.for_each_batch(chunk, [&](Batch batch) {
        Pack packs[kBatch] = {};
        Protocol::read(op, stage, batch, packs, site);
        if (step.receive_from >= 0) {
          Pack received[kBatch] = {};
          Protocol::read(op, receive, batch, received, site);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            Accumulator<typename Op::Value> sum(packs[k]);
            sum.add(received[k]);
            packs[k] = step.overwrites ? received[k] : sum.round();
          }
        }
        if (last) {
          on_batch(batch, packs);
        } else {
          Protocol::write(op, next_stage, batch, packs);
        }
      });
      if (last) {
        on_chunk(chunk);
      } else {
        send_chunk<Protocol>(op, group, group.inter_step[i + 1], chunk);
      }
    });
  }
}

} // namespace nvrar

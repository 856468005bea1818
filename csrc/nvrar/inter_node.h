// Inter-node phase: recursive doubling or halving among the owners of the same shard, with puts and signals only.
// Never load from or store to another rank's memory here. It works on one GPU, but not over a network.
#pragma once
#include "protocol.h"

namespace nvrar {

// Sends a chunk of a step from the stage slot of `staged`. Each chunk is its own put, so the next one is added while
// this one is in flight.
template <class Protocol, class Op>
NVRAR_DEVICE void send_chunk(Op& op, const Group& group, const InterStep& step, const InterStep& staged, Chunk chunk) {
  if (step.send_to < 0) return;
  const Region& region = Protocol::region(group);
  uint64_t receive = region.data_offset(op.parity, region.receive_slot(step.slot));
  uint64_t stage = region.data_offset(op.parity, region.stage_slot(staged.slot));
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
        send_chunk<Protocol>(op, group, group.inter_step[i + 1], group.inter_step[i + 1], chunk);
      }
    });
  }
}

// Waits for a chunk of an inter-node step, and returns the receive slot.
template <class Protocol, class Op>
NVRAR_DEVICE const char* await_chunk(Op& op, const Group& group, const InterStep& step, WaitSite site, Chunk chunk) {
  const Region& region = Protocol::region(group);
  Protocol::wait_signals(op, 1, [&](int) {
    char* signal = group.own_memory + region.signal_offset(op.parity, region.receive_slot(step.slot), chunk.index);
    return SignalWait{reinterpret_cast<uint64_t*>(signal), site, true};
  });
  return group.own_memory + region.data_offset(op.parity, region.receive_slot(step.slot));
}

// As exchange_shard, with half of the bytes per round: recursive halving, then recursive doubling of the finished
// chunks. In round r a rank gives half of its chunks to its partner and adds the partner's to the other half. Then each
// finished chunk goes to the partners of the rounds before, last round first. Needs a group with rounds.
//
// The additions are those of recursive doubling, so the results have the same bits. No slots are added:
// - A receive slot serves both messages of a partner: partial sums of the half that this rank keeps, and finished
//   chunks of the half that it gave away.
// - Finished chunks are staged in the slot of the first round. They are in the half that was not sent from there,
//   except those of the last message, which are not sent on.
template <class Protocol, class Op, class OnBatch, class OnChunk>
NVRAR_DEVICE void exchange_halves(Op& op, const Group& group, Span shard, OnBatch on_batch, OnChunk on_chunk) {
  const Region& region = Protocol::region(group);
  int begin = group.first_round, end = begin + group.rounds;
  auto stage_of = [&](int i) {
    return group.own_memory + region.data_offset(op.parity, region.stage_slot(group.inter_step[i].slot));
  };
  // Adds the chunk of step i to this rank's partial sums, and calls `use` with each batch.
  auto add_chunk = [&](int i, Chunk chunk, auto use) {
    WaitSite site{kInterNode, i, group.inter_step[i].receive_from};
    const char* received = await_chunk<Protocol>(op, group, group.inter_step[i], site, chunk);
    op.for_each_batch(chunk, [&](Batch batch) {
      Pack packs[kBatch] = {}, terms[kBatch] = {};
      Protocol::read(op, stage_of(i), batch, packs, site);
      Protocol::read(op, received, batch, terms, site);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        Accumulator<typename Op::Value> sum(packs[k]);
        sum.add(terms[k]);
        packs[k] = sum.round();
      }
      use(batch, packs);
    });
  };
  auto finish_batch = [&](Batch batch, const Pack(&packs)[kBatch], bool sent_on) {
    on_batch(batch, packs);
    if (sent_on) Protocol::write(op, stage_of(begin), batch, packs);
    if (end < group.inter_steps) Protocol::write(op, stage_of(end), batch, packs); // fold out
  };
  // `round`: the chunk goes to the partners of the rounds before this one.
  auto finish_chunk = [&](Chunk chunk, int round) {
    on_chunk(chunk);
    for (int i = round - 1; i >= begin; --i) {
      send_chunk<Protocol>(op, group, group.inter_step[i], group.inter_step[begin], chunk);
    }
    if (end < group.inter_steps) send_chunk<Protocol>(op, group, group.inter_step[end], group.inter_step[end], chunk);
  };

  ChunkRange range = op.chunks_of(shard);
  for (int i = 0; i < end; ++i) { // a fold in, then the rounds
    if (i >= begin) range = range.half(group.inter_step[i].keeps_upper);
    bool finished = i + 1 == end;
    ChunkRange next = finished ? ChunkRange{0, 0} : range.half(!group.inter_step[i + 1].keeps_upper);
    op.for_each_chunk(shard, range, [&](Chunk chunk) {
      add_chunk(i, chunk, [&](Batch batch, const Pack(&packs)[kBatch]) {
        if (finished) {
          finish_batch(batch, packs, true);
        } else {
          Protocol::write(op, stage_of(i + 1), batch, packs);
        }
      });
      if (finished) {
        finish_chunk(chunk, end);
      } else if (next.has(chunk.index)) {
        send_chunk<Protocol>(op, group, group.inter_step[i + 1], group.inter_step[i + 1], chunk);
      }
    });
  }
  for (int round = end - 1; round >= begin; --round) {
    ChunkRange given = op.chunks_of(shard); // the chunks that the partner of this round has finished
    for (int i = begin; i < round; ++i) given = given.half(group.inter_step[i].keeps_upper);
    given = given.half(!group.inter_step[round].keeps_upper);
    WaitSite site{kInterNode, round, group.inter_step[round].receive_from};
    op.for_each_chunk(shard, given, [&](Chunk chunk) {
      const char* received = await_chunk<Protocol>(op, group, group.inter_step[round], site, chunk);
      op.for_each_batch(chunk, [&](Batch batch) {
        Pack packs[kBatch] = {};
        Protocol::read(op, received, batch, packs, site);
        finish_batch(batch, packs, round > begin);
      });
      finish_chunk(chunk, round);
    });
  }
}

} // namespace nvrar

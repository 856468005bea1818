// The phase between nodes: recursive doubling among the owners of the same piece, with puts and signals alone.
// No pointer into another rank's memory is used here: on one GPU it would work, on a network there is none.
#pragma once
#include "protocol.h"

namespace nvrar {

// Sends a chunk that this block has staged. Chunks leave one by one, so the next is added while this one travels.
template <class Protocol, class Op> NVRAR_DEVICE void send(Op& op, const Group& group, const Move& move, Chunk chunk) {
  if (move.to < 0) return;
  const Region& region = Protocol::region(group);
  uint64_t there = region.data(op.parity, region.receive(move.exchange));
  uint64_t here = region.data(op.parity, region.stage(move.exchange));
  uint64_t signal = region.signal(op.parity, region.receive(move.exchange), chunk.index);
  Protocol::put(op, move.remote + there, group.self + here, chunk, reinterpret_cast<uint64_t*>(move.remote + signal),
                move.to);
}

// Runs all moves on a piece whose chunks are staged and sent for the first of them; gives finished batches to `give`,
// and finished chunks to `done`. What is added is the rounded sum that went over the wire, so both sides of an
// exchange add the same two numbers.
template <class Protocol, class Op, class Give, class Done>
NVRAR_DEVICE void exchange(Op& op, const Group& group, Span piece, Give give, Done done) {
  const Region& region = Protocol::region(group);
  for (int m = 0; m < group.moves; ++m) {
    const Move& move = group.move[m];
    bool last = m + 1 == group.moves;
    Site site{kBetween, m, move.from};
    const char* mine = group.self + region.data(op.parity, region.stage(move.exchange));
    const char* theirs = group.self + region.data(op.parity, region.receive(move.exchange));
    char* next = last ? nullptr : group.self + region.data(op.parity, region.stage(group.move[m + 1].exchange));
    op.each_chunk(piece, [&](Chunk chunk) {
      if (move.from >= 0) {
        Protocol::arrive(op, 1, [&](int) {
          char* at = group.self + region.signal(op.parity, region.receive(move.exchange), chunk.index);
          return Awaited{reinterpret_cast<uint64_t*>(at), site, true};
        });
      }
      op.each_batch(chunk, [&](Batch batch) {
        Unit units[kBatch] = {};
        Protocol::read(op, mine, batch, units, site);
        if (move.from >= 0) {
          Unit received[kBatch] = {};
          Protocol::read(op, theirs, batch, received, site);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            Wide<typename Op::Value> sum(units[k]);
            sum.add(received[k]);
            units[k] = move.replaces ? received[k] : sum.narrow();
          }
        }
        if (last) {
          give(batch, units);
        } else {
          Protocol::write(op, next, batch, units);
        }
      });
      if (last) {
        done(chunk);
      } else {
        send<Protocol>(op, group, group.move[m + 1], chunk);
      }
    });
  }
}

} // namespace nvrar

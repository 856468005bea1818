// The phases inside a node, through pointers into each other's memory: contributions to the owners of the pieces
// before, finished pieces from them after.
#pragma once
#include "protocol.h"

namespace nvrar {

// Every rank gives each owner its part of that owner's piece.
template <class Protocol, class Op> NVRAR_DEVICE void contribute(Op& op, const Group& group) {
  const Region& region = Protocol::region(group);
  int slot = region.reduce(group.local);
  for (int turn = 0; turn < group.owners; ++turn) {
    int owner = (group.local + turn) % group.owners; // not everybody the same one first
    if (owner == group.local) continue;
    Span piece = piece_of(op.call.units, group.owners, owner);
    op.each_chunk(piece, [&](Chunk chunk) {
      op.each_batch(chunk, [&](Batch batch) {
        Unit units[kBatch];
        op.load(piece, batch, units);
        Protocol::write(op, group.peer[owner] + region.data(op.parity, slot), batch, units);
      });
      Protocol::announce(op, 1, [&](int) {
        return reinterpret_cast<uint64_t*>(group.peer[owner] + region.signal(op.parity, slot, chunk.index));
      });
    });
  }
}

// An owner sums its piece over the ranks of its node, in their order, and hands each chunk to `give` and then `done`.
template <class Protocol, class Op, class Give, class Done>
NVRAR_DEVICE void reduce(Op& op, const Group& group, Span piece, Give give, Done done) {
  const Region& region = Protocol::region(group);
  op.each_chunk(piece, [&](Chunk chunk) {
    Protocol::arrive(op, group.locals, [&](int source) {
      char* at = group.self + region.signal(op.parity, region.reduce(source), chunk.index);
      return Awaited{source == group.local ? nullptr : reinterpret_cast<uint64_t*>(at),
                     Site{kReduce, 0, group.rank_of[source]}, false};
    });
    op.each_batch(chunk, [&](Batch batch) {
      Wide<typename Op::Value> sums[kBatch];
      for (int source = 0; source < group.locals; ++source) {
        Unit units[kBatch] = {};
        if (source == group.local) {
          op.load(piece, batch, units);
        } else {
          const char* slot = group.self + region.data(op.parity, region.reduce(source));
          Protocol::read(op, slot, batch, units, Site{kReduce, 0, group.rank_of[source]});
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (source == 0) {
            sums[k] = Wide<typename Op::Value>(units[k]);
          } else {
            sums[k].add(units[k]);
          }
        }
      }
      Unit rounded[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) rounded[k] = sums[k].narrow();
      give(batch, rounded);
    });
    done(chunk);
  });
}

// An owner keeps a batch of its finished piece and gives it to the other ranks of its node.
template <class Protocol, class Op>
NVRAR_DEVICE void spread(Op& op, const Group& group, Span piece, Batch batch, const Unit (&units)[kBatch]) {
  const Region& region = Protocol::region(group);
  op.store(piece, batch, units);
  for (int turn = 1; turn < group.locals; ++turn) {
    int peer = (group.local + turn) % group.locals;
    Protocol::write(op, group.peer[peer] + region.data(op.parity, region.gather(group.local)), batch, units);
  }
}

template <class Protocol, class Op> NVRAR_DEVICE void announce_spread(Op& op, const Group& group, Chunk chunk) {
  const Region& region = Protocol::region(group);
  Protocol::announce(op, group.locals, [&](int peer) {
    uint64_t at = region.signal(op.parity, region.gather(group.local), chunk.index);
    return peer == group.local ? nullptr : reinterpret_cast<uint64_t*>(group.peer[peer] + at);
  });
}

// Everybody takes the other owners' finished pieces.
template <class Protocol, class Op> NVRAR_DEVICE void gather(Op& op, const Group& group) {
  const Region& region = Protocol::region(group);
  for (int turn = 0; turn < group.owners; ++turn) {
    int owner = (group.local + turn) % group.owners;
    if (owner == group.local) continue;
    Span piece = piece_of(op.call.units, group.owners, owner);
    int slot = region.gather(owner);
    Site site{kGather, 0, group.rank_of[owner]};
    op.each_chunk(piece, [&](Chunk chunk) {
      Protocol::arrive(op, 1, [&](int) {
        char* at = group.self + region.signal(op.parity, slot, chunk.index);
        return Awaited{reinterpret_cast<uint64_t*>(at), site, false};
      });
      op.each_batch(chunk, [&](Batch batch) {
        Unit units[kBatch];
        Protocol::read(op, group.self + region.data(op.parity, slot), batch, units, site);
        op.store(piece, batch, units);
      });
    });
  }
}

} // namespace nvrar

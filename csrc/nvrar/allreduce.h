// NVRAR: an all-reduce over nodes of several ranks, in one kernel.
//
// Inside each node the message is cut into pieces, and an owner sums each (intra_node.h). Between nodes, owners of the same
// piece sum theirs by recursive doubling (inter_node.h). Then each owner gives its piece to its node. Nodes that have more
// ranks than the smallest have ranks that own nothing; they contribute and receive.
//
// Nothing is acknowledged. A rank that has finished operation k - 1 has the contribution of every rank to it, so every
// rank has left operation k - 2, and its buffers are free for operation k: two parities are enough. The first piece is
// never empty, so this holds for any message of at least one element.
#pragma once
#include "inter_node.h"
#include "epilogue.h"
#include "intra_node.h"

namespace nvrar {

template <class Value, class Protocol, class Wire>
NVRAR_DEVICE void all_reduce(Wire& wire, const Group& group, const Call& call) {
  Operation<Wire, Value> op(wire, call, group.state, group.status, group.timeout, group.id);
  contribute<Protocol>(op, group);
  if (group.local < group.owners) {
    Span piece = piece_of(call.units, group.owners, group.local);
    auto give = [&](Batch batch, const Unit(&units)[kBatch]) { spread<Protocol>(op, group, piece, batch, units); };
    auto done = [&](Chunk chunk) { announce_spread<Protocol>(op, group, chunk); };
    if (group.moves == 0) {
      reduce<Protocol>(op, group, piece, give, done);
    } else {
      const Region& region = Protocol::region(group);
      const Move& first = group.move[0];
      char* stage = group.self + region.data(op.parity, region.stage(first.exchange));
      reduce<Protocol>(
          op, group, piece,
          [&](Batch batch, const Unit(&units)[kBatch]) { Protocol::write(op, stage, batch, units); },
          [&](Chunk chunk) { send<Protocol>(op, group, first, chunk); });
      exchange<Protocol>(op, group, piece, give, done);
    }
  }
  gather<Protocol>(op, group);
  if (call.rows) {
    meet(op);
    add_and_norm(op);
  }
  op.finish();
}

} // namespace nvrar

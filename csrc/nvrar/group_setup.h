// Host code that fills in a Group: memory layout and inter-node steps, from the node of each member.
#pragma once
#include <algorithm>
#include <vector>

#include "layout.h"

namespace nvrar {

// Groups the members by node. Nodes are ordered by their first member, members by rank.
inline std::vector<std::vector<int>> by_node(const int32_t* node_of, int size) {
  std::vector<int32_t> names;
  std::vector<std::vector<int>> nodes;
  for (int member = 0; member < size; ++member) {
    size_t node = std::find(names.begin(), names.end(), node_of[member]) - names.begin();
    if (node == names.size()) {
      names.push_back(node_of[member]);
      nodes.emplace_back();
    }
    nodes[node].push_back(member);
  }
  return nodes;
}

// The bytes of a slot for one shard of a message of `capacity` bytes, where a pack occupies `slot_pack_bytes`.
inline uint64_t compute_slot_bytes(uint64_t capacity, int shards, int slot_pack_bytes) {
  uint64_t packs = (capacity + kPackBytes - 1) / kPackBytes;
  return (packs + shards - 1) / shards * slot_pack_bytes;
}

// Fills in the ranks, shards and regions of `group` for `rank`, for operations of up to `ll_capacity` and
// `signal_capacity` bytes. Returns the bytes of the group's memory, or 0 if a node has more than kMaxLocalRanks ranks.
inline uint64_t init_layout(Group& group, const int32_t* node_of, int size, int rank, uint64_t ll_capacity,
                            uint64_t signal_capacity) {
  std::vector<std::vector<int>> nodes = by_node(node_of, size);
  size_t largest = 0, smallest = kMaxLocalRanks;
  for (auto& node : nodes) {
    largest = std::max(largest, node.size());
    smallest = std::min(smallest, node.size());
  }
  if (largest > kMaxLocalRanks) return 0;
  int rounds = 0, count = int(nodes.size());
  while (2 << rounds <= count) ++rounds;
  bool folds = 1 << rounds < count;
  for (auto& node : nodes) {
    auto found = std::find(node.begin(), node.end(), rank);
    if (found == node.end()) continue;
    group.local_rank = int(found - node.begin());
    group.local_size = int(node.size());
  }
  group.shards = int(smallest);
  group.nodes = count;
  int inter_slots = rounds + (folds ? 2 : 0);
  int32_t reduce_slots = largest > 1 ? int32_t(largest) : 0, gather_slots = largest > 1 ? group.shards : 0;
  uint64_t ll_slot = compute_slot_bytes(ll_capacity, group.shards, 2 * kPackBytes);
  uint64_t signal_slot = compute_slot_bytes(signal_capacity, group.shards, kPackBytes);
  group.ll_region = Region{0, ll_slot, reduce_slots, gather_slots, inter_slots};
  group.signal_region = Region{group.ll_region.bytes(), signal_slot, reduce_slots, gather_slots, inter_slots};
  uint64_t used = (group.ll_region.bytes() + group.signal_region.bytes() + kLineBytes - 1) / kLineBytes * kLineBytes;
  uint64_t line_slot = (compute_slot_bytes(ll_capacity, group.shards, 1) + kLinePacks - 1) / kLinePacks * kLineBytes;
  group.line_region = Region{used, line_slot, 0, 0, inter_slots};
  return used + group.line_region.bytes();
}

// Fills in the inter-node steps of `rank`. `pe` and `offset` have each member's PE and the offset of its group memory
// in its arena. `arena` is this rank's arena: adding a remote offset to it gives a symmetric address.
//
// With n nodes and 2^d <= n < 2^(d+1), each node beyond 2^d sends its sum to a partner below 2^d first (fold in) and
// receives the result from it last (fold out).
inline void init_inter_steps(Group& group, const int32_t* node_of, int size, int rank, const int32_t* pe,
                             const uint64_t* offset, char* arena) {
  std::vector<std::vector<int>> nodes = by_node(node_of, size);
  int count = int(nodes.size()), node = 0, rounds = 0;
  while (std::find(nodes[node].begin(), nodes[node].end(), rank) == nodes[node].end()) ++node;
  while (2 << rounds <= count) ++rounds;
  int power = 1 << rounds;
  bool folds = power < count;
  group.inter_steps = group.first_round = group.rounds = 0;
  if (group.local_rank >= group.shards) return;
  auto add_step = [&](int slot, int partner, bool sends, bool receives, bool overwrites) {
    int member = nodes[partner][group.local_rank];
    group.inter_step[group.inter_steps++] = InterStep{slot, sends ? pe[member] : -1, receives ? pe[member] : -1,
                                                      overwrites, node > partner, arena + offset[member]};
  };
  if (node >= power) {
    add_step(0, node - power, true, false, false);
    add_step(rounds + 1, node - power, false, true, true);
    return;
  }
  bool has_folded = node + power < count;
  if (has_folded) add_step(0, node + power, false, true, false);
  group.first_round = group.inter_steps;
  group.rounds = rounds;
  for (int round = 0; round < rounds; ++round) add_step(round + folds, node ^ (1 << round), true, true, false);
  if (has_folded) add_step(rounds + 1, node + power, true, false, false);
}

} // namespace nvrar

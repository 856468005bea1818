// From who shares a node with whom to a rank's part in the algorithm. Host code.
#pragma once
#include <algorithm>
#include <vector>

#include "layout.h"

namespace nvrar {

// The members of a group, by node: nodes in order of their first member, members in order of rank.
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

inline uint64_t slot_bytes(uint64_t capacity, int owners, int wire_unit) {
  uint64_t units = (capacity + kUnit - 1) / kUnit;
  return (units + owners - 1) / owners * wire_unit;
}

// Fills in the shape of `group` as `rank` sees it, and the regions that hold messages of these many bytes. Returns the
// size of the group's memory, or 0 where a node has more ranks than fit.
inline uint64_t shape(Group& group, const int32_t* node_of, int size, int rank, uint64_t words, uint64_t signals) {
  std::vector<std::vector<int>> nodes = by_node(node_of, size);
  size_t widest = 0, owners = kMaxLocals;
  for (auto& node : nodes) {
    widest = std::max(widest, node.size());
    owners = std::min(owners, node.size());
  }
  if (widest > kMaxLocals) return 0;
  int doubling = 0, count = int(nodes.size());
  while (2 << doubling <= count) ++doubling;
  bool folds = 1 << doubling < count;
  for (auto& node : nodes) {
    auto found = std::find(node.begin(), node.end(), rank);
    if (found == node.end()) continue;
    group.local = int(found - node.begin());
    group.locals = int(node.size());
  }
  group.owners = int(owners);
  int exchanges = doubling + (folds ? 2 : 0);
  int32_t sources = widest > 1 ? int32_t(widest) : 0, pieces = widest > 1 ? group.owners : 0;
  group.words = Region{0, slot_bytes(words, group.owners, 2 * kUnit), sources, pieces, exchanges};
  group.signals = Region{group.words.bytes(), slot_bytes(signals, group.owners, kUnit), sources, pieces, exchanges};
  return group.words.bytes() + group.signals.bytes();
}

// Fills in the moves between nodes. `world` has each member's rank in the world, `offset` where its group memory lies
// in its arena, and `arena` is this rank's, which makes symmetric addresses of them.
//
// With n nodes and 2^d <= n, the nodes beyond 2^d first give their sums to a partner below, and last get the result.
inline void plan_moves(Group& group, const int32_t* node_of, int size, int rank, const int32_t* world,
                       const uint64_t* offset, char* arena) {
  std::vector<std::vector<int>> nodes = by_node(node_of, size);
  int count = int(nodes.size()), node = 0, doubling = 0;
  while (std::find(nodes[node].begin(), nodes[node].end(), rank) == nodes[node].end()) ++node;
  while (2 << doubling <= count) ++doubling;
  int even = 1 << doubling;
  bool folds = even < count;
  group.moves = 0;
  if (group.local >= group.owners) return;
  auto move = [&](int exchange, int partner, bool sends, bool receives, bool replaces) {
    int member = nodes[partner][group.local];
    group.move[group.moves++] = Move{exchange, sends ? world[member] : -1, receives ? world[member] : -1, replaces,
                                     arena + offset[member]};
  };
  if (node >= even) {
    move(0, node - even, true, false, false);
    move(doubling + 1, node - even, false, true, true);
    return;
  }
  bool helps = node + even < count;
  if (helps) move(0, node + even, false, true, false);
  for (int step = 0; step < doubling; ++step) move(step + folds, node ^ (1 << step), true, true, false);
  if (helps) move(doubling + 1, node + even, true, false, false);
}

} // namespace nvrar

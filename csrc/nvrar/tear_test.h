// Whether lines of 128 bytes arrive whole between nodes, as LineProtocol needs: partners send each other lines in which
// every word has the number of the round. A line is torn if its flag is newer than another of its words.
#pragma once
#include "protocol.h"

namespace nvrar {

constexpr uint32_t kTearTestLines = 256;

// Counts torn lines in `torn`. One block runs it on every rank of the group, with the same `base`, which exceeds that
// of the test before by more than `rounds`. No operation of the group may be running, and a quiet and a barrier have to
// follow.
template <class Op>
NVRAR_DEVICE void tear_test(Op& op, const Group& group, uint64_t base, uint32_t rounds, uint32_t* torn) {
  constexpr uint64_t kMark = uint64_t(1) << 63; // above the flags of operations
  constexpr int kWords = kLineBytes / 8, kFlagWord = kLinePacks * kPackBytes / 8;
  const Region& region = group.line_region;
  uint32_t lines = uint32_t(region.slot_bytes / kLineBytes);
  if (lines > kTearTestLines) lines = kTearTestLines;
  for (int i = group.first_round; i < group.first_round + group.rounds; ++i) {
    const InterStep& step = group.inter_step[i];
    uint64_t receive = region.data_offset(0, region.receive_slot(step.slot));
    for (uint32_t round = 1; round <= rounds; ++round) {
      uint64_t value = kMark + base + round;
      // The partner has received round r - 2 before it sends round r - 1, so this stage slot is free.
      char* stage = group.own_memory + region.data_offset(int(round & 1), region.stage_slot(step.slot));
      for (uint32_t line = op.transport.thread(); line < lines; line += op.transport.threads()) {
        for (int word = 0; word < kWords; ++word) {
          op.transport.store_word(reinterpret_cast<uint64_t*>(stage + uint64_t(line) * kLineBytes) + word, value);
        }
      }
      op.transport.sync();
      op.transport.release_sources();
      op.transport.put(step.remote_memory + receive, stage, uint64_t(lines) * kLineBytes, step.send_to);
      for (uint32_t line = op.transport.thread(); line < lines; line += op.transport.threads()) {
        const uint64_t* words =
            reinterpret_cast<const uint64_t*>(group.own_memory + receive + uint64_t(line) * kLineBytes);
        op.wait_until(WaitSite{kInterNode, i, step.receive_from},
                      [&] { return op.transport.load_signal(words + kFlagWord) >= value; });
        bool whole = true; // a word may already be of the next round
        for (int word = 0; word < kFlagWord; ++word) whole = whole && op.transport.load_signal(words + word) >= value;
        if (!whole) op.transport.fetch_increment(torn);
      }
      op.transport.sync();
    }
  }
}

} // namespace nvrar

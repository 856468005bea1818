// How data and the news of its arrival travel: as words that carry a flag each, or as data followed by a signal.
#pragma once
#include "operation.h"

namespace nvrar {

// A signal in a group's memory, what waiting for it is waiting for, and whether a put brings it.
struct Awaited {
  uint64_t* signal;
  Site site;
  bool put;
};

// Eight-byte words, half data and half flag. The receiver polls the data itself: lowest latency, twice the bytes.
struct Words {
  static constexpr int kWireUnit = 2 * kUnit;
  static NVRAR_SHARED const Region& region(const Group& group) { return group.words; }

  template <class Op>
  static NVRAR_DEVICE void write(Op& op, char* slot, Batch batch, const Unit (&units)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!batch.has(k)) continue;
      Line* line = reinterpret_cast<Line*>(slot + uint64_t(batch.unit(k)) * kWireUnit);
      op.wire.store_line(line, Line{units[k].word[0], op.flag, units[k].word[1], op.flag});
      op.wire.store_line(line + 1, Line{units[k].word[2], op.flag, units[k].word[3], op.flag});
    }
  }

  // Waits until the whole batch is there.
  template <class Op>
  static NVRAR_DEVICE void read(Op& op, const char* slot, Batch batch, Unit (&units)[kBatch], Site site) {
    op.await(site, [&] {
      bool ready = true;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!batch.has(k)) continue;
        const Line* line = reinterpret_cast<const Line*>(slot + uint64_t(batch.unit(k)) * kWireUnit);
        Line a = op.wire.load_line(line), b = op.wire.load_line(line + 1);
        ready = ready && a.flag0 == op.flag && a.flag1 == op.flag && b.flag0 == op.flag && b.flag1 == op.flag;
        units[k] = Unit{{a.data0, a.data1, b.data0, b.data1}};
      }
      return ready;
    });
  }

  template <class Op, class From> static NVRAR_DEVICE void arrive(Op&, int, From) {}
  template <class Op, class To> static NVRAR_DEVICE void announce(Op&, int, To) {}

  template <class Op>
  static NVRAR_DEVICE void put(Op& op, char* to, const char* from, Chunk chunk, uint64_t*, int rank) {
    op.wire.sync();
    uint64_t begin = uint64_t(chunk.begin) * kWireUnit;
    op.wire.put(to + begin, from + begin, uint64_t(chunk.end - chunk.begin) * kWireUnit, rank);
  }
};

// Data as it is, and a signal for each chunk: half the bytes, and the receiver waits twice, for signal and data.
struct Signals {
  static constexpr int kWireUnit = kUnit;
  static NVRAR_SHARED const Region& region(const Group& group) { return group.signals; }

  template <class Op>
  static NVRAR_DEVICE void write(Op& op, char* slot, Batch batch, const Unit (&units)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) op.wire.store_data(reinterpret_cast<Unit*>(slot) + batch.unit(k), units[k]);
    }
  }

  template <class Op>
  static NVRAR_DEVICE void read(Op& op, const char* slot, Batch batch, Unit (&units)[kBatch], Site) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) units[k] = op.wire.load_data(reinterpret_cast<const Unit*>(slot) + batch.unit(k));
    }
  }

  // Waits until a chunk is there from each of `count` senders; `from(i)` gives the i-th one's signal and site.
  template <class Op, class From> static NVRAR_DEVICE void arrive(Op& op, int count, From from) {
    for (int i = op.wire.thread(); i < count; i += op.wire.threads()) {
      Awaited sender = from(i);
      if (!sender.signal) continue;
      op.await(sender.site, [&] { return op.wire.load_signal(sender.signal) >= op.number + 1; });
      if (sender.put && !op.aborted) op.wire.settle(sender.signal, op.number + 1);
    }
    op.wire.sync();
  }

  // Tells each of `count` ranks of the node that what this block has written to it is there.
  template <class Op, class To> static NVRAR_DEVICE void announce(Op& op, int count, To to) {
    op.wire.sync();
    for (int i = op.wire.thread(); i < count; i += op.wire.threads()) {
      if (uint64_t* signal = to(i)) op.wire.store_signal(signal, op.number + 1);
    }
  }

  template <class Op>
  static NVRAR_DEVICE void put(Op& op, char* to, const char* from, Chunk chunk, uint64_t* signal, int rank) {
    op.wire.sync();
    uint64_t begin = uint64_t(chunk.begin) * kWireUnit;
    uint64_t bytes = uint64_t(chunk.end - chunk.begin) * kWireUnit;
    op.wire.put_signal(to + begin, from + begin, bytes, signal, op.number + 1, rank);
  }
};

} // namespace nvrar

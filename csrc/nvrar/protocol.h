// The protocols for data and its arrival: LL (low latency, a flag in every 8 bytes), put-with-signal, and lines (a flag
// in every 128 bytes).
#pragma once
#include "operation.h"

namespace nvrar {

// A signal to wait for.
struct SignalWait {
  uint64_t* signal; // null: nothing to wait for
  WaitSite site;
  bool from_put; // true: set by a put; false: by a store of a rank on the same node
};

// LL protocol, as in NCCL: every 8-byte store holds 4 bytes of data and a 4-byte flag derived from the sequence number.
// The receiver polls the data itself, so there is no separate signal and no fence: lowest latency, twice the bytes. It
// relies on aligned 8-byte stores and puts not being torn. Flags are never cleared: the next use of a slot has another
// sequence number.
struct LLProtocol {
  using InNode = LLProtocol; // what is used within a node
  static constexpr int kSlotPackBytes = 2 * kPackBytes;
  static NVRAR_SHARED const Region& region(const Group& group) { return group.ll_region; }

  template <class Op>
  static NVRAR_DEVICE void write(Op& op, char* slot, Batch batch, const Pack (&packs)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!batch.has(k)) continue;
      LLLine* line = reinterpret_cast<LLLine*>(slot + uint64_t(batch.pack(k)) * kSlotPackBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t* data = &packs[k].word[2 * half];
        op.transport.store_line(line + half, LLLine{{LLLine::make(data[0], op.flag), LLLine::make(data[1], op.flag)}});
      }
    }
  }

  // Waits until the whole batch has arrived.
  template <class Op>
  static NVRAR_DEVICE void read(Op& op, const char* slot, Batch batch, Pack (&packs)[kBatch], WaitSite site) {
    op.wait_until(site, [&] {
      bool ready = true;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!batch.has(k)) continue;
        const LLLine* line = reinterpret_cast<const LLLine*>(slot + uint64_t(batch.pack(k)) * kSlotPackBytes);
        LLLine a = op.transport.load_line(line), b = op.transport.load_line(line + 1);
        ready = ready && a.flag(0) == op.flag && a.flag(1) == op.flag && b.flag(0) == op.flag && b.flag(1) == op.flag;
        packs[k] = Pack{{a.data(0), a.data(1), b.data(0), b.data(1)}};
      }
      return ready;
    });
  }

  // No signals: the flags are in the data.
  template <class Op, class From> static NVRAR_DEVICE void wait_signals(Op&, int, From) {}
  template <class Op, class To> static NVRAR_DEVICE void signal_peers(Op&, int, To) {}

  template <class Op>
  static NVRAR_DEVICE void put(Op& op, char* to, const char* from, Chunk chunk, uint64_t*, int pe) {
    op.transport.sync();
    op.transport.release_sources();
    uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;
    op.transport.put(to + begin, from + begin, uint64_t(chunk.end - chunk.begin) * kSlotPackBytes, pe);
  }
};

// Put-with-signal protocol: plain data, then one 64-bit signal per chunk that is ordered after the data. The signal's
// value is the sequence number plus one. Half the bytes of LL, but the receiver waits for the signal and then loads.
struct SignalProtocol {
  using InNode = SignalProtocol;
  static constexpr int kSlotPackBytes = kPackBytes;
  static NVRAR_SHARED const Region& region(const Group& group) { return group.signal_region; }

  template <class Op>
  static NVRAR_DEVICE void write(Op& op, char* slot, Batch batch, const Pack (&packs)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) op.transport.store_data(reinterpret_cast<Pack*>(slot) + batch.pack(k), packs[k]);
    }
  }

  template <class Op>
  static NVRAR_DEVICE void read(Op& op, const char* slot, Batch batch, Pack (&packs)[kBatch], WaitSite) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) packs[k] = op.transport.load_data(reinterpret_cast<const Pack*>(slot) + batch.pack(k));
    }
  }

  // Waits until a chunk has arrived from each of `count` senders. `from(i)` returns the SignalWait of sender i.
  template <class Op, class From> static NVRAR_DEVICE void wait_signals(Op& op, int count, From from) {
    for (int i = op.transport.thread(); i < count; i += op.transport.threads()) {
      SignalWait sender = from(i);
      if (!sender.signal) continue;
      op.wait_until(sender.site, [&] { return op.transport.load_signal(sender.signal) >= op.sequence + 1; });
      if (sender.from_put && !op.aborted) op.transport.acquire_put(sender.signal, op.sequence + 1);
    }
    op.transport.sync();
  }

  // Signals `count` ranks of the node that a chunk has been written. `to(i)` returns the address of signal i, or null.
  template <class Op, class To> static NVRAR_DEVICE void signal_peers(Op& op, int count, To to) {
    op.transport.sync();
    for (int i = op.transport.thread(); i < count; i += op.transport.threads()) {
      if (uint64_t* signal = to(i)) op.transport.store_signal(signal, op.sequence + 1);
    }
  }

  template <class Op>
  static NVRAR_DEVICE void put(Op& op, char* to, const char* from, Chunk chunk, uint64_t* signal, int pe) {
    op.transport.sync();
    op.transport.release_sources();
    uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;
    uint64_t bytes = uint64_t(chunk.end - chunk.begin) * kSlotPackBytes;
    op.transport.put_signal(to + begin, from + begin, bytes, signal, op.sequence + 1, pe);
  }
};

// Lines of 128 bytes: seven packs and a 64-bit flag, the sequence number plus one. 1.14 times the bytes of the data
// instead of 2 with LL. It relies on lines arriving whole, which tear_test.h checks. Only between nodes: all threads
// that write a line are done when it is put. Chunks consist of whole lines.
struct LineProtocol {
  using InNode = LLProtocol;
  static NVRAR_SHARED const Region& region(const Group& group) { return group.line_region; }
  static NVRAR_DEVICE uint64_t line_offset(uint32_t pack) { return uint64_t(pack / kLinePacks) * kLineBytes; }
  static NVRAR_DEVICE uint64_t flag_offset(uint32_t pack) { return line_offset(pack) + kLinePacks * kPackBytes; }
  static NVRAR_DEVICE uint64_t data_offset(uint32_t pack) {
    return line_offset(pack) + pack % kLinePacks * kPackBytes;
  }

  template <class Op>
  static NVRAR_DEVICE void write(Op& op, char* slot, Batch batch, const Pack (&packs)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!batch.has(k)) continue;
      uint32_t pack = batch.pack(k);
      op.transport.store_data(reinterpret_cast<Pack*>(slot + data_offset(pack)), packs[k]);
      if (pack % kLinePacks == 0) {
        op.transport.store_word(reinterpret_cast<uint64_t*>(slot + flag_offset(pack)), op.sequence + 1);
      }
    }
  }

  // Waits until the lines of the whole batch have arrived.
  template <class Op>
  static NVRAR_DEVICE void read(Op& op, const char* slot, Batch batch, Pack (&packs)[kBatch], WaitSite site) {
    op.wait_until(site, [&] {
      bool ready = true;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!batch.has(k)) continue;
        const char* flag = slot + flag_offset(batch.pack(k));
        ready = ready && op.transport.load_signal(reinterpret_cast<const uint64_t*>(flag)) == op.sequence + 1;
      }
      return ready;
    });
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!batch.has(k)) continue;
      packs[k] = op.transport.load_data(reinterpret_cast<const Pack*>(slot + data_offset(batch.pack(k))));
    }
  }

  template <class Op, class From> static NVRAR_DEVICE void wait_signals(Op&, int, From) {}

  template <class Op>
  static NVRAR_DEVICE void put(Op& op, char* to, const char* from, Chunk chunk, uint64_t*, int pe) {
    op.transport.sync();
    op.transport.release_sources();
    uint64_t begin = line_offset(chunk.begin), end = line_offset(chunk.end - 1) + kLineBytes;
    op.transport.put(to + begin, from + begin, end - begin, pe);
  }
};

} // namespace nvrar

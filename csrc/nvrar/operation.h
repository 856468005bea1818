// One operation in the making: its number, how its work is cut, and how it waits.
//
// Everything here and in the phases is written against a Wire: what a thread of a block can do. gpu_transport.cuh is the
// real one; a test has another, whose puts arrive late and out of order. A Wire has
//   thread() threads() block() blocks() sync()        its place, and the barrier of its block
//   load_line(from), store_line(to, line)             two words, neither of them torn; own or a peer's memory
//   load_data(from), store_data(to, unit)             sixteen bytes without flags, ordered by signals
//   load_signal(from), store_signal(to, value)        acquire and release, of all stores before the last sync()
//   put(to, from, bytes, rank), put_signal(...)       into another rank's memory; called by the whole block
//   settle(signal, value)                             after a put's signal is seen: its data is seen too
//   count(counter), wake(generation), generation(at)  for the blocks of this rank: who is last; a barrier's turns
//   sum(value), rsqrt(value)                          a sum over the threads of the block
//   now(), pause(), stopped(...), report(...)         for waits: the clock; whether to end; why it ended
#pragma once
#include "pack.h"

namespace nvrar {

constexpr int kBatch = 2;            // units that a thread has in flight
constexpr uint32_t kPatience = 1024; // polls between two looks at the clock

// Two words: four bytes of data, and the operation's number as a flag, twice.
struct alignas(16) Line {
  uint32_t data0, flag0, data1, flag1;
};

struct Chunk {
  uint32_t index, begin, end; // its number within the piece; units, counted from the start of the piece
};

// The units that one thread handles together: from `first`, every `stride`th.
struct Batch {
  uint32_t first, end, stride;
  NVRAR_DEVICE bool has(int k) const { return first + k * stride < end; }
  NVRAR_DEVICE uint32_t unit(int k) const { return first + k * stride; }
};

// What a wait is for, to be reported if it never ends.
struct Site {
  Phase phase;
  int step, peer;
};

template <class WireT, class ValueT> struct Operation {
  using Wire = WireT;
  using Value = ValueT;

  Wire& wire;
  const Call& call;
  State* state;
  Status* status;
  uint64_t timeout;
  int group;
  uint64_t number;
  uint32_t flag;   // the number as words carry it; never 0, which is what memory starts with
  int parity;
  bool aborted;

  NVRAR_DEVICE Operation(Wire& wire, const Call& call, State* state, Status* status, uint64_t timeout, int group)
      : wire(wire), call(call), state(state), status(status), timeout(timeout), group(group) {
    number = state->number;
    aborted = state->aborted;
    flag = uint32_t(number % 0xfffffffeu) + 2;
    parity = int(number & 1);
  }

  // Polls until `ready()`; gives up where the time is over or somebody else has given up.
  template <class Ready> NVRAR_DEVICE void await(Site site, Ready ready) {
    uint64_t began = 0;
    for (uint32_t polls = 1; !ready() && !aborted; ++polls) {
      wire.pause();
      if (polls % kPatience) continue;
      uint64_t now = wire.now();
      if (!began) began = now;
      if (now - began > timeout) wire.report(state, status, group, number, site);
      aborted = wire.stopped(state, status);
    }
  }

  template <class Use> NVRAR_DEVICE void each_chunk(Span piece, Use use) {
    uint32_t units = piece.end - piece.begin;
    for (uint32_t index = wire.block(); index * call.chunk < units; index += wire.blocks()) {
      uint32_t begin = index * call.chunk;
      use(Chunk{index, begin, begin + call.chunk < units ? begin + call.chunk : units});
    }
  }

  // A unit belongs to the same thread in every phase, so a thread may read what it wrote without a barrier.
  template <class Use> NVRAR_DEVICE void each_batch(Chunk chunk, Use use) {
    for (uint32_t unit = chunk.begin + wire.thread(); unit < chunk.end; unit += kBatch * wire.threads()) {
      use(Batch{unit, chunk.end, uint32_t(wire.threads())});
    }
  }

  NVRAR_DEVICE void load(Span piece, Batch batch, Unit (&units)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) units[k] = load_unit<Value>(call.x, call.count, call.aligned, piece.begin + batch.unit(k));
    }
  }

  NVRAR_DEVICE void store(Span piece, Batch batch, const Unit (&units)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) store_unit<Value>(call.out, call.count, call.aligned, piece.begin + batch.unit(k), units[k]);
    }
  }

  // The last block to finish advances the number; the next kernel of the stream reads it.
  NVRAR_DEVICE void finish() {
    wire.sync();
    if (wire.thread() == 0 && wire.count(&state->ticket) == uint32_t(wire.blocks()) - 1) {
      state->ticket = 0;
      state->number = number + 1;
    }
  }
};

} // namespace nvrar

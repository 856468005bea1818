// One operation (one all-reduce kernel launch): its sequence number, how its work is divided, and how it waits.
//
// A shard is divided into chunks, which blocks take in turn (chunk i belongs to block i mod blocks). A chunk is divided
// into packs of 16 bytes, which the threads of the block take in turn.
//
// This file and the phases are written against a Transport: the operations of one thread. gpu_transport.cuh has it with
// NVSHMEM; tests/unit/nvrar_twin.cpp simulates it on the CPU, with puts that arrive late and out of order.
//   thread() threads() block() blocks() sync()    indices and sizes of the launch; barrier of the block
//   load_line(from), store_line(to, line)         16 bytes of the LL protocol; each 8-byte half is never torn
//   load_data(from), store_data(to, pack)         16 bytes without flags, ordered by signals
//   store_word(to, value)                         8 bytes of the own memory
//   load_signal(from), store_signal(to, value)    acquire; release of all stores before the last sync()
//   release_sources()                             after sync(), before put: makes the block's stores visible to a CPU
//                                                 or NIC that reads the sources of puts
//   put(to, from, bytes, pe)                      to the memory of another PE; called by the whole block
//   put_signal(to, from, bytes, signal, value, pe)
//   acquire_put(signal, value)                    call after the signal of a put was seen, before its data is read
//   fetch_increment(counter)                      atomic, between the blocks of this rank
//   load_generation(from), advance_generation(generation)  for the barrier of the blocks of this rank
//   block_sum(value), rsqrt(value)                sum over the threads of the block
//   now(), pause()                                clock in ns; called between polls
//   should_stop(...), report_timeout(...)         whether a wait must end; records the first wait that timed out
#pragma once
#include "pack.h"

namespace nvrar {

constexpr int kBatch = 2;                     // packs that a thread has in flight
constexpr uint32_t kPollsPerClockRead = 1024; // a wait reads the clock and the stop flag this rarely

// Two words of the LL protocol, as in NCCL: 4 bytes of data and 4 bytes of flag each. A word is accessed as one 64-bit
// unit, because the elements of a vector of 32-bit values are separate accesses in PTX's memory model.
struct alignas(16) LLLine {
  uint64_t word[2];
  NVRAR_DEVICE static uint64_t make(uint32_t data, uint32_t flag) { return uint64_t(flag) << 32 | data; }
  NVRAR_DEVICE uint32_t data(int i) const { return uint32_t(word[i]); }
  NVRAR_DEVICE uint32_t flag(int i) const { return uint32_t(word[i] >> 32); }
};

struct Chunk {
  uint32_t index, begin, end; // index within the shard; range of packs, relative to the shard
};

// Chunks [begin, end) of a shard.
struct ChunkRange {
  uint32_t begin, end;
  NVRAR_DEVICE bool has(uint32_t index) const { return begin <= index && index < end; }
  // The lower or upper half. The lower one is the larger, so the first chunk is never in an empty half.
  NVRAR_DEVICE ChunkRange half(bool upper) const {
    uint32_t middle = begin + (end - begin + 1) / 2;
    return upper ? ChunkRange{middle, end} : ChunkRange{begin, middle};
  }
};

// The packs that one thread handles at once: `first`, `first + stride`, ... below `end`.
struct Batch {
  uint32_t first, end, stride;
  NVRAR_DEVICE bool has(int k) const { return first + k * stride < end; }
  NVRAR_DEVICE uint32_t pack(int k) const { return first + k * stride; }
};

// What a wait is for, reported if it times out.
struct WaitSite {
  Phase phase;
  int step, peer;
};

template <class TransportT, class ValueT> struct Operation {
  using Transport = TransportT;
  using Value = ValueT;

  Transport& transport;
  const KernelArgs& args;
  GroupState* state;
  Status* status;
  uint64_t timeout;
  int group;
  uint64_t sequence;
  uint32_t flag; // the sequence number as a flag of the LL protocol; never 0, the initial content of memory
  int parity;    // selects one of the two sets of buffers
  bool aborted;

  NVRAR_DEVICE Operation(Transport& transport, const KernelArgs& args, GroupState* state, Status* status,
                         uint64_t timeout, int group)
      : transport(transport), args(args), state(state), status(status), timeout(timeout), group(group) {
    sequence = state->sequence;
    aborted = state->aborted;
    flag = uint32_t(sequence % 0xfffffffeu) + 2;
    parity = int(sequence & 1);
  }

  // Polls until `ready()`. Gives up after the timeout, or if another wait has given up or the host requests a stop.
  template <class Ready> NVRAR_DEVICE void wait_until(WaitSite site, Ready ready) {
    uint64_t start = 0;
    for (uint32_t polls = 1; !ready() && !aborted; ++polls) {
      transport.pause();
      if (polls % kPollsPerClockRead) continue;
      uint64_t now = transport.now();
      if (!start) start = now;
      if (now - start > timeout) transport.report_timeout(state, status, group, sequence, site);
      aborted = transport.should_stop(state, status);
    }
  }

  NVRAR_DEVICE ChunkRange chunks_of(Span shard) const {
    return {0, (shard.end - shard.begin + args.chunk_packs - 1) / args.chunk_packs};
  }

  // Calls `use` with each chunk of the shard that belongs to this block, in order; with `range`, only with its chunks.
  template <class Use> NVRAR_DEVICE void for_each_chunk(Span shard, Use use) {
    for_each_chunk(shard, chunks_of(shard), use);
  }
  template <class Use> NVRAR_DEVICE void for_each_chunk(Span shard, ChunkRange range, Use use) {
    uint32_t packs = shard.end - shard.begin, blocks = transport.blocks();
    uint32_t first = transport.block();
    if (first < range.begin) first += (range.begin - first + blocks - 1) / blocks * blocks;
    for (uint32_t index = first; index < range.end; index += blocks) {
      uint32_t begin = index * args.chunk_packs;
      use(Chunk{index, begin, begin + args.chunk_packs < packs ? begin + args.chunk_packs : packs});
    }
  }

  // Calls `use` with each batch of the chunk that belongs to this thread. A pack belongs to the same thread in every
  // phase, so a thread can read back what it wrote without a barrier.
  template <class Use> NVRAR_DEVICE void for_each_batch(Chunk chunk, Use use) {
    for (uint32_t pack = chunk.begin + transport.thread(); pack < chunk.end; pack += kBatch * transport.threads()) {
      use(Batch{pack, chunk.end, uint32_t(transport.threads())});
    }
  }

  NVRAR_DEVICE void load(Span shard, Batch batch, Pack (&packs)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) packs[k] = load_pack<Value>(args.x, args.count, args.aligned, shard.begin + batch.pack(k));
    }
  }

  NVRAR_DEVICE void store(Span shard, Batch batch, const Pack (&packs)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (batch.has(k)) store_pack<Value>(args.out, args.count, args.aligned, shard.begin + batch.pack(k), packs[k]);
    }
  }

  // The last block to finish advances the sequence number, which the next kernel of the stream reads. It is in device
  // memory because CUDA graph capture would freeze a kernel argument.
  NVRAR_DEVICE void finish() {
    transport.sync();
    if (transport.thread() == 0 && transport.fetch_increment(&state->blocks_done) == uint32_t(transport.blocks()) - 1) {
      state->blocks_done = 0;
      state->sequence = sequence + 1;
    }
  }
};

} // namespace nvrar

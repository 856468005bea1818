// What host and device agree on: a group's shape, and where things lie in its memory.
//
// The memory of a group is one range of every member's symmetric arena. It holds a region for each protocol. A region
// has, for each of two parities, slots for what ranks of the node contribute (reduce), what its owners finished
// (gather), what other nodes sent (receive), and what this rank sends to other nodes (stage).
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define NVRAR_DEVICE __device__ __forceinline__
#define NVRAR_SHARED __host__ __device__ __forceinline__
#else
#define NVRAR_DEVICE inline
#define NVRAR_SHARED inline
#endif

namespace nvrar {

constexpr int kUnit = 16;         // bytes of data that one thread loads, adds and stores at a time
constexpr int kMaxLocals = 64;    // ranks of one node
constexpr int kMaxExchanges = 18; // between nodes: up to 2^16 of them, and folding in and out
constexpr int kMaxChunks = 1024;  // of a piece: there is a signal for each

enum Phase : uint32_t { kReduce = 1, kBetween = 2, kGather = 3, kEpilogue = 4, kFlat = 5 };

// One exchange between this rank's node and another, as this rank takes part in it.
struct Move {
  int32_t exchange; // its slot, the same on both sides
  int32_t to;       // the rank (of NVSHMEM's world) that is sent this rank's sum, or -1
  int32_t from;     // the one whose sum is received, or -1
  int32_t replaces; // whether what is received is the sum of all, rather than another part of it
  char* remote;     // the receiver's group memory, as a symmetric address
};

struct Region {
  uint64_t base, slot; // bytes: from the start of the group's memory; of one slot
  int32_t widest, owners, exchanges; // ranks of the largest node and its owners, 0 where nodes have one rank

  NVRAR_SHARED int slots() const { return widest + owners + 2 * exchanges; }
  NVRAR_SHARED int reduce(int source) const { return source; }
  NVRAR_SHARED int gather(int owner) const { return widest + owner; }
  NVRAR_SHARED int receive(int exchange) const { return widest + owners + exchange; }
  NVRAR_SHARED int stage(int exchange) const { return widest + owners + exchanges + exchange; }
  NVRAR_SHARED uint64_t data(int parity, int index) const { return base + uint64_t(parity * slots() + index) * slot; }
  NVRAR_SHARED uint64_t signal(int parity, int index, uint32_t chunk) const {
    return base + 2 * uint64_t(slots()) * slot + (uint64_t(parity * slots() + index) * kMaxChunks + chunk) * 8;
  }
  NVRAR_SHARED uint64_t bytes() const { return 2 * uint64_t(slots()) * (slot + 8 * kMaxChunks); }
};

// In device memory, one for each group; written by its kernels only.
struct State {
  uint64_t number;  // of the next operation
  uint32_t aborted; // a wait timed out or the host said stop: nobody waits any more
  uint32_t ticket;  // blocks that have finished the operation
  uint32_t arrived; // blocks that have reached the barrier before the epilogue
  uint32_t generation;
};

// In host memory that the device sees, one for each process: the first wait that timed out.
struct Status {
  uint32_t stop;     // set by the host: nobody waits any more
  uint32_t reported; // set by the device, after everything below
  uint32_t group, phase, step, peer;
  uint64_t number;
};

struct Group {
  int32_t id, local, locals, owners; // this rank's place in its node; how many there are; how many of them own a piece
  int32_t moves;
  Move move[kMaxExchanges];
  char* self;                   // this rank's group memory
  char* peer[kMaxLocals];       // that of each rank of the node, as pointers to load and store through
  int32_t rank_of[kMaxLocals];  // their ranks in the world, for reports
  Region words, signals;
  State* state;
  Status* status;
  uint64_t timeout; // ns
};

// One operation, as it is launched.
struct Call {
  const void* x;
  void* out;
  uint64_t count;     // elements
  uint32_t units;     // of kUnit bytes, the last perhaps not full
  uint32_t chunk;     // units
  int32_t aligned;    // whether x and out start at a multiple of kUnit
  // The epilogue, unless rows is 0: residual += out; normed = residual / rms(residual) * weight.
  uint32_t rows, width;
  int32_t packed;      // whether every row of these starts at a multiple of kUnit
  int32_t wide_weight; // the weight is float32, whatever the other tensors are
  float eps;
  void *residual, *normed;
  const void* weight;
};

// A cut of the message or of a piece, in units.
struct Span {
  uint32_t begin, end;
};

// The piece of the message that an owner sums.
NVRAR_SHARED Span piece_of(uint32_t units, int owners, int owner) {
  uint32_t each = (units + owners - 1) / owners;
  uint32_t begin = owner * each < units ? owner * each : units;
  return {begin, begin + each < units ? begin + each : units};
}

} // namespace nvrar

// Data structures shared by host and device: the description of a group and the layout of its memory.
//
// The memory of a group is one range of every member's symmetric arena. It holds one region per protocol. A region has
// two copies of every slot, one for even and one for odd sequence numbers (double buffering). The slots are:
//   reduce   inputs from each rank of the node, for the shard that this rank owns
//   gather   finished shards from each owner of the node
//   receive  partial sums from other nodes, one slot per inter-node step
//   stage    partial sums to other nodes, one slot per inter-node step: the source of puts
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

constexpr int kPackBytes = 16;     // a pack: the data that one thread loads, adds and stores at once
constexpr int kLineBytes = 128;    // a line of LineProtocol: kLinePacks packs, then a flag
constexpr int kLinePacks = 7;
constexpr int kMaxLocalRanks = 64; // ranks per node
constexpr int kMaxInterSteps = 18; // enough for 2^16 nodes: 16 rounds of recursive doubling, fold in and fold out
constexpr int kMaxChunks = 1024;   // chunks per shard; each has its own signal

// How a message travels: with recursive doubling or halving between nodes, or, on one node, as one shot.
enum Schedule { kDoubling = 0, kHalving = 1, kOneShotInNode = 2 };
enum Phase : uint32_t { kReduceScatter = 1, kInterNode = 2, kAllGather = 3, kEpilogue = 4, kBaseline = 5 };

// One inter-node step of this rank. Ranks are NVSHMEM PEs.
struct InterStep {
  int32_t slot;         // index of the receive and stage slots, the same on both sides
  int32_t send_to;      // the PE that gets this rank's partial sum, or -1
  int32_t receive_from; // the PE whose partial sum is received, or -1
  int32_t overwrites;   // the received data is the final sum (fold out), not a term to add
  int32_t keeps_upper;  // halving: this rank sums the upper half of its chunks, its partner the lower half
  char* remote_memory;  // the partner's group memory, as a symmetric address
};

struct Region {
  uint64_t base, slot_bytes; // offset in the group's memory; size of one slot
  // Numbers of slots. The first two are the ranks of the largest node and the shards, or 0 if all nodes have one rank.
  int32_t reduce_slots, gather_slots, inter_slots;

  NVRAR_SHARED int slots() const { return reduce_slots + gather_slots + 2 * inter_slots; }
  NVRAR_SHARED int reduce_slot(int source) const { return source; }
  NVRAR_SHARED int gather_slot(int owner) const { return reduce_slots + owner; }
  NVRAR_SHARED int receive_slot(int step) const { return reduce_slots + gather_slots + step; }
  NVRAR_SHARED int stage_slot(int step) const { return reduce_slots + gather_slots + inter_slots + step; }
  NVRAR_SHARED uint64_t data_offset(int parity, int index) const {
    return base + uint64_t(parity * slots() + index) * slot_bytes;
  }
  NVRAR_SHARED uint64_t signal_offset(int parity, int index, uint32_t chunk) const {
    return base + 2 * uint64_t(slots()) * slot_bytes + (uint64_t(parity * slots() + index) * kMaxChunks + chunk) * 8;
  }
  NVRAR_SHARED uint64_t bytes() const { return 2 * uint64_t(slots()) * (slot_bytes + 8 * kMaxChunks); }
};

// In device memory, one per group, written only by its kernels.
struct GroupState {
  uint64_t sequence;          // sequence number of the next operation
  uint32_t aborted;           // a wait timed out or the host requested a stop: no wait blocks any more
  uint32_t blocks_done;       // blocks that have finished the current operation
  uint32_t blocks_at_barrier; // blocks that have reached the barrier before the epilogue
  uint32_t barrier_generation;
};

// In mapped host memory, one per process: the first wait that timed out. Python reads it (Status in library.py).
struct Status {
  uint32_t stop;     // set by the host: end all waits
  uint32_t reported; // set by the device, after all fields below
  uint32_t group, phase, step, peer;
  uint64_t sequence;
};

struct Group {
  int32_t id, local_rank, local_size, shards; // local rank i < shards owns shard i
  int32_t nodes;
  int32_t inter_steps;
  int32_t first_round, rounds; // the steps of inter_step that exchange with a partner; the others fold in or out
  InterStep inter_step[kMaxInterSteps];
  char* own_memory;                  // this rank's group memory
  char* peer_memory[kMaxLocalRanks]; // group memory of each rank of the node, accessible by loads and stores
  int32_t local_pe[kMaxLocalRanks];  // PE of each rank of the node, for timeout reports
  Region ll_region, signal_region, line_region; // the last one has only the slots between nodes
  GroupState* state;
  Status* status;
  uint64_t timeout;  // ns
  int32_t host_heap; // the memory of groups is host memory
};

// The arguments of one operation.
struct KernelArgs {
  const void* x;
  void* out;
  uint64_t count;       // elements
  uint32_t packs;       // the last one may be partial
  uint32_t chunk_packs; // packs per chunk
  int32_t aligned;      // x and out are aligned to kPackBytes
  // The epilogue, skipped if rows is 0: summed = residual + out; normed = summed / rms(summed) * weight.
  uint32_t rows, width;
  int32_t rows_aligned; // every row of the epilogue's tensors is aligned to kPackBytes
  int32_t fp32_weight;  // the weight is float32, whatever the dtype of the other tensors
  float eps;
  const void *residual, *weight;
  void *summed, *normed;
};

// A range of the message or of a shard, in packs.
struct Span {
  uint32_t begin, end;
};

// The packs of the message that belong to shard `index`.
NVRAR_SHARED Span shard_span(uint32_t packs, int shards, int index) {
  uint32_t each = (packs + shards - 1) / shards;
  uint32_t begin = index * each < packs ? index * each : packs;
  return {begin, begin + each < packs ? begin + each : packs};
}

} // namespace nvrar

// Host side, as a flat C interface (bound by yalis/comm/nvrar/library.py): NVSHMEM initialization, the arena, groups
// and kernel launches. Functions that can fail return a negative value, and nvrar_error() returns the reason.
//
// The arena is one allocation of the symmetric heap with the same size on every rank. Groups reserve ranges of it,
// whose offsets may differ between ranks. dtype: 0 float32, 1 float16, 2 bfloat16. protocol: 0 LL, 1 put-with-signal.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "allreduce.h"
#include "baselines.h"
#include "gpu_transport.cuh"
#include "group_setup.h"

using namespace nvrar;

namespace {

template <class Value, class Protocol>
__global__ void __launch_bounds__(kMaxThreads)
    all_reduce_kernel(const __grid_constant__ Group group, const KernelArgs args) {
  GpuTransport transport;
  all_reduce<Value, Protocol>(transport, group, args);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads)
    ring_kernel(const __grid_constant__ FlatGroup group, const KernelArgs args) {
  GpuTransport transport;
  ring<Value>(transport, group, args);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads)
    one_shot_kernel(const __grid_constant__ FlatGroup group, const KernelArgs args) {
  GpuTransport transport;
  one_shot<Value>(transport, group, args);
}

std::string last_error;
int fail(const std::string& why) {
  last_error = why;
  return -1;
}
int fail(const char* what, cudaError_t error) {
  return fail(std::string(what) + ": " + cudaGetErrorString(error));
}

char* arena = nullptr;
uint64_t arena_size = 0, arena_used = 0;
Status *status = nullptr, *status_on_device = nullptr;
std::vector<std::unique_ptr<Group>> groups;
std::vector<std::unique_ptr<FlatGroup>> flat_groups;

GroupState* allocate_state() {
  GroupState* state = nullptr;
  if (cudaMalloc(&state, sizeof(GroupState)) != cudaSuccess) return nullptr;
  if (cudaMemset(state, 0, sizeof(GroupState)) != cudaSuccess) return nullptr;
  return state;
}

int dtype_bytes(int dtype) { return dtype == 0 ? 4 : 2; }

KernelArgs make_args(const void* x, void* out, uint64_t count, int dtype, int shards, uint64_t chunk) {
  KernelArgs args{};
  args.x = x;
  args.out = out;
  args.count = count;
  args.packs = uint32_t((count * dtype_bytes(dtype) + kPackBytes - 1) / kPackBytes);
  // Chunks are whole cache lines, so that no two blocks write to the same one, and there are at most kMaxChunks.
  uint64_t shard = (args.packs + shards - 1) / shards, line = 128 / kPackBytes;
  uint64_t packs = std::max({chunk / kPackBytes, (shard + kMaxChunks - 1) / kMaxChunks, line});
  args.chunk_packs = uint32_t((packs + line - 1) / line * line);
  args.aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % kPackBytes == 0;
  return args;
}

template <class Value>
void launch_nvrar(int protocol, int blocks, int threads, cudaStream_t stream, const Group& group,
                  const KernelArgs& args) {
  if (protocol == 0) {
    all_reduce_kernel<Value, LLProtocol><<<blocks, threads, 0, stream>>>(group, args);
  } else {
    all_reduce_kernel<Value, SignalProtocol><<<blocks, threads, 0, stream>>>(group, args);
  }
}

template <class Value>
void launch_flat(int algorithm, int blocks, int threads, cudaStream_t stream, const FlatGroup& group,
                 const KernelArgs& args) {
  if (algorithm == kRing) {
    ring_kernel<Value><<<blocks, threads, 0, stream>>>(group, args);
  } else {
    one_shot_kernel<Value><<<blocks, threads, 0, stream>>>(group, args);
  }
}

// Loads the kernels now. Otherwise their first launch does, which may be inside a CUDA graph capture.
template <class Value> cudaError_t load_kernels() {
  cudaFuncAttributes found;
  for (const void* kernel : {reinterpret_cast<const void*>(all_reduce_kernel<Value, LLProtocol>),
                             reinterpret_cast<const void*>(all_reduce_kernel<Value, SignalProtocol>),
                             reinterpret_cast<const void*>(ring_kernel<Value>),
                             reinterpret_cast<const void*>(one_shot_kernel<Value>)}) {
    cudaError_t error = cudaFuncGetAttributes(&found, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// NVSHMEM 3.4.5 allocates the integer by which device code requests an exit with cudaMallocHost and does not initialize
// it. The driver reuses freed memory for small allocations, and with a 2 in there (PROXY_GLOBAL_EXIT_REQUESTED) the
// proxy thread marks NVSHMEM as not initialized, whose next function ends the process. This leaves zeros in that memory.
cudaError_t clear_freed_pinned_memory() {
  int* held[256];
  int count = 0;
  cudaError_t error = cudaSuccess;
  for (; count < 256; ++count) {
    error = cudaMallocHost(reinterpret_cast<void**>(&held[count]), sizeof(int));
    if (error != cudaSuccess) break;
    *held[count] = 0;
  }
  while (count > 0) cudaFreeHost(held[--count]);
  return error;
}

int check_launch(const char* what) {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? 0 : fail(what, error);
}

bool invalid_launch(int dtype, int blocks, int threads) {
  return dtype < 0 || dtype > 2 || blocks < 1 || threads < 32 || threads > kMaxThreads || threads % 32;
}

} // namespace

extern "C" {

const char* nvrar_error() { return last_error.c_str(); }

int nvrar_unique_id_bytes() { return int(sizeof(nvshmemx_uniqueid_t)); }

// Rank 0 calls this. All ranks pass its result to nvrar_init.
int nvrar_get_unique_id(void* id) {
  nvshmemx_uniqueid_t unique_id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&unique_id)) return fail("nvshmemx_get_uniqueid failed");
  std::memcpy(id, &unique_id, sizeof unique_id);
  return 0;
}

// Collective: every rank of the world calls this, with the same size of the arena.
int nvrar_init(int device, int rank, int size, const void* id, uint64_t bytes) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = clear_freed_pinned_memory();
  if (error != cudaSuccess) return fail("preparing the device", error);
  nvshmemx_uniqueid_t unique_id;
  std::memcpy(&unique_id, id, sizeof unique_id);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(rank, size, &unique_id, &attributes);
  if (nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes)) return fail("NVSHMEM initialization failed");
  arena = static_cast<char*>(nvshmem_align(256, bytes));
  if (!arena) return fail("out of memory for the arena in NVSHMEM's symmetric heap");
  arena_size = bytes;
  arena_used = 0;
  error = cudaMemset(arena, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return fail("clearing the arena", error);
  error = cudaHostAlloc(reinterpret_cast<void**>(&status), sizeof(Status), cudaHostAllocMapped);
  if (error != cudaSuccess) return fail("allocating the status", error);
  std::memset(status, 0, sizeof(Status));
  error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&status_on_device), status, 0);
  if (error != cudaSuccess) return fail("allocating the status", error);
  if (error == cudaSuccess) error = load_kernels<Float32>();
  if (error == cudaSuccess) error = load_kernels<Float16>();
  if (error == cudaSuccess) error = load_kernels<Bfloat16>();
  if (error != cudaSuccess) return fail("loading the kernels", error);
  nvshmem_barrier_all();
  return 0;
}

Status* nvrar_status() { return status; }
char* nvrar_arena() { return arena; }

// Reserves a range of this rank's arena. Returns its offset, or -1 if the arena is full.
int64_t nvrar_reserve(uint64_t bytes) {
  uint64_t rounded = (bytes + 255) / 256 * 256;
  if (arena_used + rounded > arena_size) return fail("the arena is full");
  arena_used += rounded;
  return int64_t(arena_used - rounded);
}

// Returns the arena bytes of a group whose operations have at most `ll_capacity` bytes with LL and `signal_capacity`
// bytes with put-with-signal; 0 if a node has more than kMaxLocalRanks ranks.
uint64_t nvrar_group_bytes(const int32_t* node_of, int size, int rank, uint64_t ll_capacity,
                           uint64_t signal_capacity) {
  Group group{};
  return init_layout(group, node_of, size, rank, ll_capacity, signal_capacity);
}

// Creates a group and returns its handle. `pe` and `offset` have each member's PE and its result of nvrar_reserve;
// `timeout` is in nanoseconds.
int nvrar_create_group(const int32_t* node_of, int size, int rank, uint64_t ll_capacity, uint64_t signal_capacity,
                       const int32_t* pe, const uint64_t* offset, uint64_t timeout) {
  auto group = std::make_unique<Group>();
  if (!init_layout(*group, node_of, size, rank, ll_capacity, signal_capacity)) {
    return fail("too many ranks on one node");
  }
  init_inter_steps(*group, node_of, size, rank, pe, offset, arena);
  group->id = int(groups.size());
  group->own_memory = arena + offset[rank];
  for (auto& node : by_node(node_of, size)) {
    if (std::find(node.begin(), node.end(), rank) == node.end()) continue;
    for (size_t i = 0; i < node.size(); ++i) {
      int member = node[i];
      group->local_pe[i] = pe[member];
      group->peer_memory[i] = static_cast<char*>(nvshmem_ptr(arena + offset[member], pe[member]));
      if (!group->peer_memory[i]) {
        return fail("no peer access to the memory of rank " + std::to_string(pe[member]) + " on the same node");
      }
    }
  }
  group->state = allocate_state();
  if (!group->state) return fail("out of memory for the state of a group");
  group->status = status_on_device;
  group->timeout = timeout;
  groups.push_back(std::move(group));
  return int(groups.size()) - 1;
}

// The maximum bytes of one operation. Longer messages are split into several operations.
uint64_t nvrar_capacity(int handle, int protocol) {
  const Group& group = *groups[handle];
  return (protocol == 0 ? group.ll_region.slot_bytes / 2 : group.signal_region.slot_bytes) * group.shards;
}

int nvrar_all_reduce(int handle, const void* x, void* out, uint64_t count, int dtype, int protocol, int blocks,
                     int threads, uint64_t chunk, cudaStream_t stream) {
  const Group& group = *groups[handle];
  if (invalid_launch(dtype, blocks, threads)) return fail("invalid dtype, blocks or threads");
  uint64_t max_count = nvrar_capacity(handle, protocol) / dtype_bytes(dtype);
  for (uint64_t begin = 0; begin < count; begin += max_count) {
    const char* from = static_cast<const char*>(x) + begin * dtype_bytes(dtype);
    char* to = static_cast<char*>(out) + begin * dtype_bytes(dtype);
    KernelArgs args = make_args(from, to, std::min(max_count, count - begin), dtype, group.shards, chunk);
    if (dtype == 0) launch_nvrar<Float32>(protocol, blocks, threads, stream, group, args);
    if (dtype == 1) launch_nvrar<Float16>(protocol, blocks, threads, stream, group, args);
    if (dtype == 2) launch_nvrar<Bfloat16>(protocol, blocks, threads, stream, group, args);
  }
  return check_launch("launching the all-reduce");
}

// All-reduce of x into out, then residual += out and normed = residual / rms(residual) * weight, in one kernel.
int nvrar_all_reduce_norm(int handle, const void* x, void* out, uint32_t rows, uint32_t width, int dtype, int protocol,
                          int blocks, int threads, uint64_t chunk, void* residual, void* normed, const void* weight,
                          int fp32_weight, float eps, cudaStream_t stream) {
  const Group& group = *groups[handle];
  uint64_t count = uint64_t(rows) * width;
  if (invalid_launch(dtype, blocks, threads)) return fail("invalid dtype, blocks or threads");
  if (count * dtype_bytes(dtype) > nvrar_capacity(handle, protocol)) return fail("message too long for one operation");
  KernelArgs args = make_args(x, out, count, dtype, group.shards, chunk);
  args.rows = rows;
  args.width = width;
  args.residual = residual;
  args.normed = normed;
  args.weight = weight;
  args.fp32_weight = fp32_weight;
  args.eps = eps;
  auto address = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor); };
  uintptr_t addresses = address(out) | address(residual) | address(normed) | address(weight);
  args.rows_aligned = (addresses | uint64_t(width) * dtype_bytes(dtype)) % kPackBytes == 0;
  if (dtype == 0) launch_nvrar<Float32>(protocol, blocks, threads, stream, group, args);
  if (dtype == 1) launch_nvrar<Float16>(protocol, blocks, threads, stream, group, args);
  if (dtype == 2) launch_nvrar<Bfloat16>(protocol, blocks, threads, stream, group, args);
  return check_launch("launching the all-reduce with its norm");
}

// Baselines for benchmarks. algorithm: see enum Algorithm.

uint64_t nvrar_flat_bytes(int algorithm, int size, uint64_t capacity) {
  FlatGroup group{};
  init_flat_layout(group, algorithm, size, capacity);
  return group.bytes();
}

int nvrar_create_flat_group(int algorithm, int size, int rank, uint64_t capacity, const int32_t* pe,
                            const uint64_t* offset, uint64_t timeout) {
  if (size > kMaxFlat) return fail("too many ranks for a baseline");
  auto group = std::make_unique<FlatGroup>();
  group->id = 1000 + int(flat_groups.size());
  group->rank = rank;
  init_flat_layout(*group, algorithm, size, capacity);
  for (int member = 0; member < size; ++member) {
    group->pe[member] = pe[member];
    group->remote_memory[member] = arena + offset[member];
  }
  group->own_memory = arena + offset[rank];
  group->state = allocate_state();
  if (!group->state) return fail("out of memory for the state of a group");
  group->status = status_on_device;
  group->timeout = timeout;
  flat_groups.push_back(std::move(group));
  return int(flat_groups.size()) - 1;
}

int nvrar_flat_all_reduce(int handle, int algorithm, const void* x, void* out, uint64_t count, int dtype, int blocks,
                          int threads, uint64_t chunk, cudaStream_t stream) {
  const FlatGroup& group = *flat_groups[handle];
  if (invalid_launch(dtype, blocks, threads)) return fail("invalid dtype, blocks or threads");
  int shards = flat_shards(algorithm, group.size);
  uint64_t max_count = group.slot_bytes / 2 * shards / dtype_bytes(dtype);
  for (uint64_t begin = 0; begin < count; begin += max_count) {
    const char* from = static_cast<const char*>(x) + begin * dtype_bytes(dtype);
    char* to = static_cast<char*>(out) + begin * dtype_bytes(dtype);
    KernelArgs args = make_args(from, to, std::min(max_count, count - begin), dtype, shards, chunk);
    if (dtype == 0) launch_flat<Float32>(algorithm, blocks, threads, stream, group, args);
    if (dtype == 1) launch_flat<Float16>(algorithm, blocks, threads, stream, group, args);
    if (dtype == 2) launch_flat<Bfloat16>(algorithm, blocks, threads, stream, group, args);
  }
  return check_launch("launching a baseline");
}

// NVSHMEM's all-reduce over all ranks of the world. x and out must be in the arena.
int nvrar_nvshmem_all_reduce(const void* x, void* out, uint64_t count, int dtype, cudaStream_t stream) {
  int error = -1;
  if (dtype == 0) {
    error = nvshmemx_float_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<float*>(out),
                                                static_cast<const float*>(x), count, stream);
  } else if (dtype == 1) {
    error = nvshmemx_half_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<half*>(out),
                                               static_cast<const half*>(x), count, stream);
  } else if (dtype == 2) {
    error = nvshmemx_bfloat16_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<__nv_bfloat16*>(out),
                                                   static_cast<const __nv_bfloat16*>(x), count, stream);
  }
  return error ? fail("NVSHMEM's all-reduce failed") : 0;
}

// Releases everything. Collective: every rank calls this, with no kernel running.
void nvrar_finalize() {
  for (auto& group : groups) cudaFree(group->state);
  for (auto& group : flat_groups) cudaFree(group->state);
  groups.clear();
  flat_groups.clear();
  cudaFreeHost(status);
  nvshmem_free(arena);
  nvshmem_finalize();
  arena = nullptr;
  status = nullptr;
}

} // extern "C"

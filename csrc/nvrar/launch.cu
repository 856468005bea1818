// Host side, as a flat C interface (bound by yalis/comm/nvrar/library.py): NVSHMEM initialization, the arena, groups
// and kernel launches. Functions that can fail return a negative value, and nvrar_error() returns the reason.
//
// The arena is one allocation of the symmetric heap with the same size on every rank. Groups reserve ranges of it,
// whose offsets may differ between ranks. dtype: 0 float32, 1 float16, 2 bfloat16. protocol: 0 LL, 1 put-with-signal,
// 2 lines.
// schedule: see enum Schedule. pdl: 0 an ordinary launch; 1 programmatic dependent launch; 2 also lets the next kernel
// start while this one waits for other ranks, which is only safe if no other rank needs this GPU.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "allreduce.h"
#include "baselines.h"
#include "gpu_transport.cuh"
#include "group_setup.h"
#include "tear_test.h"

using namespace nvrar;

namespace {

// Waits until the previous launch has finished, so that the operations of a group never overlap.
__device__ __forceinline__ void begin_launch(int pdl) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (pdl == 2) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class Value, class Protocol, Schedule schedule>
__global__ void __launch_bounds__(kMaxThreads)
    all_reduce_kernel(const __grid_constant__ Group group, const KernelArgs args, const int pdl) {
  GpuTransport transport{group.host_heap != 0};
  begin_launch(pdl);
  all_reduce<Value, Protocol, schedule>(transport, group, args);
}

__global__ void __launch_bounds__(kMaxThreads)
    tear_test_kernel(const __grid_constant__ Group group, uint64_t base, uint32_t rounds, uint32_t* torn) {
  GpuTransport transport{group.host_heap != 0};
  const KernelArgs args{};
  Operation<GpuTransport, Float32> op(transport, args, group.state, group.status, group.timeout, group.id);
  tear_test(op, group, base, rounds, torn);
  if (threadIdx.x == 0) nvshmem_quiet();
}

// The epilogue of all_reduce_kernel alone, with the same bits.
template <class Value> __global__ void __launch_bounds__(kMaxThreads) add_norm_kernel(const KernelArgs args) {
  GpuTransport transport{false};
  add_and_norm<Value>(transport, args);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads)
    ring_kernel(const __grid_constant__ FlatGroup group, const KernelArgs args) {
  GpuTransport transport{group.host_heap != 0};
  ring<Value>(transport, group, args);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads)
    one_shot_kernel(const __grid_constant__ FlatGroup group, const KernelArgs args) {
  GpuTransport transport{group.host_heap != 0};
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
bool arena_on_host = false;
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

KernelArgs make_args(const void* x, void* out, uint64_t count, int dtype, int shards, uint64_t chunk, int protocol) {
  KernelArgs args{};
  args.x = x;
  args.out = out;
  args.count = count;
  args.packs = uint32_t((count * dtype_bytes(dtype) + kPackBytes - 1) / kPackBytes);
  // Chunks are whole cache lines, so that no two blocks write to the same one, and there are at most kMaxChunks. With
  // protocol 2 they are whole lines of that protocol too.
  uint64_t shard = (args.packs + shards - 1) / shards, line = 128 / kPackBytes;
  if (protocol == 2) line *= kLinePacks;
  uint64_t packs = std::max({chunk / kPackBytes, (shard + kMaxChunks - 1) / kMaxChunks, line});
  args.chunk_packs = uint32_t((packs + line - 1) / line * line);
  args.aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % kPackBytes == 0;
  return args;
}

// How to launch one operation.
struct LaunchOptions {
  int protocol, schedule, blocks, threads, pdl;
  cudaStream_t stream;

  bool invalid() const {
    return protocol < 0 || protocol > 2 || schedule < 0 || schedule > kOneShotInNode || blocks < 1 || threads < 32 ||
           threads > kMaxThreads || threads % 32;
  }
};

using Kernel = void (*)(Group, KernelArgs, int);

template <class Value> Kernel choose_kernel(int protocol, int schedule) {
  static const Kernel kernels[3][3] = {
      {all_reduce_kernel<Value, LLProtocol, kDoubling>, all_reduce_kernel<Value, LLProtocol, kHalving>,
       all_reduce_kernel<Value, LLProtocol, kOneShotInNode>},
      {all_reduce_kernel<Value, SignalProtocol, kDoubling>, all_reduce_kernel<Value, SignalProtocol, kHalving>,
       all_reduce_kernel<Value, SignalProtocol, kOneShotInNode>},
      {all_reduce_kernel<Value, LineProtocol, kDoubling>, all_reduce_kernel<Value, LineProtocol, kHalving>,
       all_reduce_kernel<Value, LLProtocol, kOneShotInNode>}};
  return kernels[protocol][schedule];
}

template <class Value>
cudaError_t launch_nvrar(const LaunchOptions& options, const Group& group, const KernelArgs& args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(options.blocks);
  config.blockDim = dim3(options.threads);
  config.stream = options.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = options.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, choose_kernel<Value>(options.protocol, options.schedule), group, args,
                            options.pdl);
}

cudaError_t launch_nvrar(int dtype, const LaunchOptions& options, const Group& group, const KernelArgs& args) {
  if (dtype == 0) return launch_nvrar<Float32>(options, group, args);
  if (dtype == 1) return launch_nvrar<Float16>(options, group, args);
  return launch_nvrar<Bfloat16>(options, group, args);
}

// The tensors of the epilogue, each [rows, width].
struct NormTensors {
  const void *residual, *weight;
  void *summed, *normed;
  int fp32_weight;
  float eps;

  void set(KernelArgs& args, uint32_t rows, uint32_t width, int dtype) const {
    args.rows = rows;
    args.width = width;
    args.residual = residual;
    args.summed = summed;
    args.normed = normed;
    args.weight = weight;
    args.fp32_weight = fp32_weight;
    args.eps = eps;
    auto address = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor); };
    uintptr_t all = address(args.out) | address(residual) | address(summed) | address(normed) | address(weight);
    args.rows_aligned = (all | uint64_t(width) * dtype_bytes(dtype)) % kPackBytes == 0;
  }
};

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
  cudaError_t error = cudaFuncGetAttributes(&found, add_norm_kernel<Value>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&found, ring_kernel<Value>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&found, one_shot_kernel<Value>);
  for (int protocol = 0; protocol < 3; ++protocol) {
    for (int schedule = 0; schedule <= kOneShotInNode; ++schedule) {
      if (error == cudaSuccess) error = cudaFuncGetAttributes(&found, choose_kernel<Value>(protocol, schedule));
    }
  }
  return error;
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
  cudaPointerAttributes memory{};
  error = cudaPointerGetAttributes(&memory, arena);
  if (error != cudaSuccess) return fail("inspecting the arena", error);
  arena_on_host = memory.type == cudaMemoryTypeHost;
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
  group->host_heap = arena_on_host;
  groups.push_back(std::move(group));
  return int(groups.size()) - 1;
}

// The maximum bytes of one operation. Longer messages are split into several operations.
uint64_t nvrar_capacity(int handle, int protocol, int schedule) {
  const Group& group = *groups[handle];
  uint64_t shard = protocol == 1 ? group.signal_region.slot_bytes : group.ll_region.slot_bytes / 2;
  return schedule == kOneShotInNode ? shard : shard * group.shards;
}

// Returns how many of the lines that arrived at this rank were torn, in so many rounds with each partner. Collective:
// all ranks of the group call this, with no operation running, and meet in a barrier after it. `base`: see tear_test().
int nvrar_tear_test(int handle, uint64_t base, int rounds, cudaStream_t stream) {
  uint32_t *torn = nullptr, found = 0;
  cudaError_t error = cudaMalloc(&torn, sizeof *torn);
  if (error == cudaSuccess) error = cudaMemsetAsync(torn, 0, sizeof *torn, stream);
  if (error == cudaSuccess) {
    tear_test_kernel<<<1, kMaxThreads, 0, stream>>>(*groups[handle], base, uint32_t(rounds), torn);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpyAsync(&found, torn, sizeof found, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaFree(torn);
  return error == cudaSuccess ? int(found) : fail("the tear test", error);
}

int nvrar_all_reduce(int handle, const void* x, void* out, uint64_t count, int dtype, int protocol, int schedule,
                     int blocks, int threads, uint64_t chunk, int pdl, cudaStream_t stream) {
  const Group& group = *groups[handle];
  LaunchOptions options{protocol, schedule, blocks, threads, pdl, stream};
  if (options.invalid() || invalid_launch(dtype, blocks, threads)) return fail("invalid launch parameters");
  if (schedule == kOneShotInNode && group.nodes > 1) return fail("one shot needs all ranks on one node");
  uint64_t max_count = nvrar_capacity(handle, protocol, schedule) / dtype_bytes(dtype);
  int shards = schedule == kOneShotInNode ? 1 : group.shards;
  for (uint64_t begin = 0; begin < count; begin += max_count) {
    const char* from = static_cast<const char*>(x) + begin * dtype_bytes(dtype);
    char* to = static_cast<char*>(out) + begin * dtype_bytes(dtype);
    KernelArgs args = make_args(from, to, std::min(max_count, count - begin), dtype, shards, chunk, protocol);
    cudaError_t error = launch_nvrar(dtype, options, group, args);
    if (error != cudaSuccess) return fail("launching the all-reduce", error);
  }
  return 0;
}

// All-reduce of x into out, then summed = residual + out and normed = summed / rms(summed) * weight, in one kernel.
int nvrar_all_reduce_norm(int handle, const void* x, void* out, uint32_t rows, uint32_t width, int dtype, int protocol,
                          int schedule, int blocks, int threads, uint64_t chunk, const void* residual, void* summed,
                          void* normed, const void* weight, int fp32_weight, float eps, int pdl, cudaStream_t stream) {
  const Group& group = *groups[handle];
  uint64_t count = uint64_t(rows) * width;
  LaunchOptions options{protocol, schedule, blocks, threads, pdl, stream};
  if (options.invalid() || invalid_launch(dtype, blocks, threads)) return fail("invalid launch parameters");
  if (schedule == kOneShotInNode && group.nodes > 1) return fail("one shot needs all ranks on one node");
  if (count * dtype_bytes(dtype) > nvrar_capacity(handle, protocol, schedule)) {
    return fail("message too long for one operation");
  }
  KernelArgs args = make_args(x, out, count, dtype, schedule == kOneShotInNode ? 1 : group.shards, chunk, protocol);
  NormTensors{residual, weight, summed, normed, fp32_weight, eps}.set(args, rows, width, dtype);
  cudaError_t error = launch_nvrar(dtype, options, group, args);
  return error == cudaSuccess ? 0 : fail("launching the all-reduce with its norm", error);
}

// The norm of nvrar_all_reduce_norm alone: summed = residual + x and normed = summed / rms(summed) * weight.
int nvrar_add_norm(void* x, uint32_t rows, uint32_t width, int dtype, int blocks, int threads, const void* residual,
                   void* summed, void* normed, const void* weight, int fp32_weight, float eps, cudaStream_t stream) {
  if (invalid_launch(dtype, blocks, threads)) return fail("invalid dtype, blocks or threads");
  KernelArgs args{};
  args.out = x;
  NormTensors{residual, weight, summed, normed, fp32_weight, eps}.set(args, rows, width, dtype);
  if (dtype == 0) add_norm_kernel<Float32><<<blocks, threads, 0, stream>>>(args);
  if (dtype == 1) add_norm_kernel<Float16><<<blocks, threads, 0, stream>>>(args);
  if (dtype == 2) add_norm_kernel<Bfloat16><<<blocks, threads, 0, stream>>>(args);
  return check_launch("launching the norm");
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
  group->host_heap = arena_on_host;
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
    KernelArgs args = make_args(from, to, std::min(max_count, count - begin), dtype, shards, chunk, 0);
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

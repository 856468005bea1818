// The host's side: NVSHMEM's start and end, the arena, groups and launches, as a flat C interface.
// What can fail returns a negative value where it does, and nvrar_error() says why.
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
__global__ void __launch_bounds__(kMaxThreads) all_reduce_kernel(const __grid_constant__ Group group, const Call call) {
  GpuWire wire;
  all_reduce<Value, Protocol>(wire, group, call);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads) ring_kernel(const __grid_constant__ FlatGroup group, const Call call) {
  GpuWire wire;
  ring<Value>(wire, group, call);
}

template <class Value>
__global__ void __launch_bounds__(kMaxThreads)
    one_shot_kernel(const __grid_constant__ FlatGroup group, const Call call) {
  GpuWire wire;
  one_shot<Value>(wire, group, call);
}

std::string problem;
int failed(const std::string& why) {
  problem = why;
  return -1;
}
int failed(const char* what, cudaError_t error) {
  return failed(std::string(what) + ": " + cudaGetErrorString(error));
}

char* arena = nullptr;
uint64_t arena_size = 0, arena_used = 0;
Status *status = nullptr, *status_on_device = nullptr;
std::vector<std::unique_ptr<Group>> groups;
std::vector<std::unique_ptr<FlatGroup>> flat_groups;

State* new_state() {
  State* state = nullptr;
  if (cudaMalloc(&state, sizeof(State)) != cudaSuccess) return nullptr;
  if (cudaMemset(state, 0, sizeof(State)) != cudaSuccess) return nullptr;
  return state;
}

int value_bytes(int value) { return value == 0 ? 4 : 2; }

Call make_call(const void* x, void* out, uint64_t count, int value, int owners, uint64_t chunk) {
  Call call{};
  call.x = x;
  call.out = out;
  call.count = count;
  call.units = uint32_t((count * value_bytes(value) + kUnit - 1) / kUnit);
  // Whole cache lines, so that no two blocks write into one; and no more chunks than there are signals.
  uint64_t piece = (call.units + owners - 1) / owners, line = 128 / kUnit;
  uint64_t units = std::max({chunk / kUnit, (piece + kMaxChunks - 1) / kMaxChunks, line});
  call.chunk = uint32_t((units + line - 1) / line * line);
  call.aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % kUnit == 0;
  return call;
}

template <class Value>
void launch_nvrar(int protocol, int blocks, int threads, cudaStream_t stream, const Group& group, const Call& call) {
  if (protocol == 0) {
    all_reduce_kernel<Value, Words><<<blocks, threads, 0, stream>>>(group, call);
  } else {
    all_reduce_kernel<Value, Signals><<<blocks, threads, 0, stream>>>(group, call);
  }
}

template <class Value>
void launch_flat(int algorithm, int blocks, int threads, cudaStream_t stream, const FlatGroup& group,
                 const Call& call) {
  if (algorithm == kRing) {
    ring_kernel<Value><<<blocks, threads, 0, stream>>>(group, call);
  } else {
    one_shot_kernel<Value><<<blocks, threads, 0, stream>>>(group, call);
  }
}

// Kernels are otherwise loaded by their first launch, which may be inside a graph capture.
template <class Value> cudaError_t load_kernels() {
  cudaFuncAttributes found;
  for (const void* kernel : {reinterpret_cast<const void*>(all_reduce_kernel<Value, Words>),
                             reinterpret_cast<const void*>(all_reduce_kernel<Value, Signals>),
                             reinterpret_cast<const void*>(ring_kernel<Value>),
                             reinterpret_cast<const void*>(one_shot_kernel<Value>)}) {
    cudaError_t error = cudaFuncGetAttributes(&found, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int launched(const char* what) {
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? 0 : failed(what, error);
}

bool bad_launch(int value, int blocks, int threads) {
  return value < 0 || value > 2 || blocks < 1 || threads < 32 || threads > kMaxThreads || threads % 32;
}

} // namespace

extern "C" {

const char* nvrar_error() { return problem.c_str(); }

int nvrar_id_bytes() { return int(sizeof(nvshmemx_uniqueid_t)); }

// What rank 0 makes and everybody starts with.
int nvrar_make_id(void* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&made)) return failed("NVSHMEM makes no unique id");
  std::memcpy(id, &made, sizeof made);
  return 0;
}

// Every rank of the world calls this; the arena is as large on each.
int nvrar_start(int device, int rank, int size, const void* id, uint64_t bytes) {
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return failed("choosing the device", error);
  nvshmemx_uniqueid_t given;
  std::memcpy(&given, id, sizeof given);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(rank, size, &given, &attributes);
  if (nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes)) return failed("NVSHMEM does not start");
  arena = static_cast<char*>(nvshmem_align(256, bytes));
  if (!arena) return failed("NVSHMEM has no memory for the arena");
  arena_size = bytes;
  arena_used = 0;
  error = cudaMemset(arena, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return failed("clearing the arena", error);
  error = cudaHostAlloc(reinterpret_cast<void**>(&status), sizeof(Status), cudaHostAllocMapped);
  if (error != cudaSuccess) return failed("memory for the status", error);
  std::memset(status, 0, sizeof(Status));
  error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&status_on_device), status, 0);
  if (error != cudaSuccess) return failed("memory for the status", error);
  if (error == cudaSuccess) error = load_kernels<Float32>();
  if (error == cudaSuccess) error = load_kernels<Float16>();
  if (error == cudaSuccess) error = load_kernels<Bfloat16>();
  if (error != cudaSuccess) return failed("loading the kernels", error);
  nvshmem_barrier_all();
  return 0;
}

Status* nvrar_status() { return status; }
char* nvrar_arena() { return arena; }

// A range of this rank's arena: where it starts, or -1 where it is full.
int64_t nvrar_reserve(uint64_t bytes) {
  uint64_t rounded = (bytes + 255) / 256 * 256;
  if (arena_used + rounded > arena_size) return failed("the arena is full");
  arena_used += rounded;
  return int64_t(arena_used - rounded);
}

// How much memory a group takes whose operations move up to these many bytes with words, and with signals.
uint64_t nvrar_group_bytes(const int32_t* node_of, int size, int rank, uint64_t words, uint64_t signals) {
  Group group{};
  return shape(group, node_of, size, rank, words, signals);
}

// Makes a group. `world` and `offset` have each member's rank in the world and what nvrar_reserve gave it.
int nvrar_group(const int32_t* node_of, int size, int rank, uint64_t words, uint64_t signals, const int32_t* world,
                const uint64_t* offset, uint64_t timeout) {
  auto group = std::make_unique<Group>();
  if (!shape(*group, node_of, size, rank, words, signals)) return failed("a node has more ranks than fit");
  plan_moves(*group, node_of, size, rank, world, offset, arena);
  group->id = int(groups.size());
  group->self = arena + offset[rank];
  for (auto& node : by_node(node_of, size)) {
    if (std::find(node.begin(), node.end(), rank) == node.end()) continue;
    for (size_t i = 0; i < node.size(); ++i) {
      int member = node[i];
      group->rank_of[i] = world[member];
      group->peer[i] = static_cast<char*>(nvshmem_ptr(arena + offset[member], world[member]));
      if (!group->peer[i]) {
        return failed("the memory of rank " + std::to_string(world[member]) + ", on the same node, cannot be reached");
      }
    }
  }
  group->state = new_state();
  if (!group->state) return failed("no memory for a group's state");
  group->status = status_on_device;
  group->timeout = timeout;
  groups.push_back(std::move(group));
  return int(groups.size()) - 1;
}

// The most bytes of one operation; longer messages are several.
uint64_t nvrar_capacity(int handle, int protocol) {
  const Group& group = *groups[handle];
  return (protocol == 0 ? group.words.slot / 2 : group.signals.slot) * group.owners;
}

int nvrar_all_reduce(int handle, const void* x, void* out, uint64_t count, int value, int protocol, int blocks,
                     int threads, uint64_t chunk, cudaStream_t stream) {
  const Group& group = *groups[handle];
  if (bad_launch(value, blocks, threads)) return failed("no such launch");
  uint64_t most = nvrar_capacity(handle, protocol) / value_bytes(value);
  for (uint64_t at = 0; at < count; at += most) {
    const char* from = static_cast<const char*>(x) + at * value_bytes(value);
    char* to = static_cast<char*>(out) + at * value_bytes(value);
    Call call = make_call(from, to, std::min(most, count - at), value, group.owners, chunk);
    if (value == 0) launch_nvrar<Float32>(protocol, blocks, threads, stream, group, call);
    if (value == 1) launch_nvrar<Float16>(protocol, blocks, threads, stream, group, call);
    if (value == 2) launch_nvrar<Bfloat16>(protocol, blocks, threads, stream, group, call);
  }
  return launched("launching the all-reduce");
}

// The sum of x in out; residual += out; normed = residual / rms(residual) * weight. In one operation.
int nvrar_all_reduce_norm(int handle, const void* x, void* out, uint32_t rows, uint32_t width, int value, int protocol,
                          int blocks, int threads, uint64_t chunk, void* residual, void* normed, const void* weight,
                          int wide_weight, float eps, cudaStream_t stream) {
  const Group& group = *groups[handle];
  uint64_t count = uint64_t(rows) * width;
  if (bad_launch(value, blocks, threads)) return failed("no such launch");
  if (count * value_bytes(value) > nvrar_capacity(handle, protocol)) return failed("too long for one operation");
  Call call = make_call(x, out, count, value, group.owners, chunk);
  call.rows = rows;
  call.width = width;
  call.residual = residual;
  call.normed = normed;
  call.weight = weight;
  call.wide_weight = wide_weight;
  call.eps = eps;
  auto place = [](const void* tensor) { return reinterpret_cast<uintptr_t>(tensor); };
  uintptr_t together = place(out) | place(residual) | place(normed) | place(weight);
  call.packed = (together | uint64_t(width) * value_bytes(value)) % kUnit == 0;
  if (value == 0) launch_nvrar<Float32>(protocol, blocks, threads, stream, group, call);
  if (value == 1) launch_nvrar<Float16>(protocol, blocks, threads, stream, group, call);
  if (value == 2) launch_nvrar<Bfloat16>(protocol, blocks, threads, stream, group, call);
  return launched("launching the all-reduce with its norm");
}

// Baselines.

uint64_t nvrar_flat_bytes(int algorithm, int size, uint64_t capacity) {
  FlatGroup group{};
  shape_flat(group, algorithm, size, capacity);
  return group.bytes();
}

int nvrar_flat_group(int algorithm, int size, int rank, uint64_t capacity, const int32_t* world, const uint64_t* offset,
                     uint64_t timeout) {
  if (size > kMaxFlat) return failed("more ranks than the baselines take");
  auto group = std::make_unique<FlatGroup>();
  group->id = 1000 + int(flat_groups.size());
  group->rank = rank;
  shape_flat(*group, algorithm, size, capacity);
  for (int member = 0; member < size; ++member) {
    group->pe[member] = world[member];
    group->remote[member] = arena + offset[member];
  }
  group->self = arena + offset[rank];
  group->state = new_state();
  if (!group->state) return failed("no memory for a group's state");
  group->status = status_on_device;
  group->timeout = timeout;
  flat_groups.push_back(std::move(group));
  return int(flat_groups.size()) - 1;
}

int nvrar_flat_all_reduce(int handle, int algorithm, const void* x, void* out, uint64_t count, int value, int blocks,
                          int threads, uint64_t chunk, cudaStream_t stream) {
  const FlatGroup& group = *flat_groups[handle];
  if (bad_launch(value, blocks, threads)) return failed("no such launch");
  int owners = flat_owners(algorithm, group.size);
  uint64_t most = group.slot / 2 * owners / value_bytes(value);
  for (uint64_t at = 0; at < count; at += most) {
    const char* from = static_cast<const char*>(x) + at * value_bytes(value);
    char* to = static_cast<char*>(out) + at * value_bytes(value);
    Call call = make_call(from, to, std::min(most, count - at), value, owners, chunk);
    if (value == 0) launch_flat<Float32>(algorithm, blocks, threads, stream, group, call);
    if (value == 1) launch_flat<Float16>(algorithm, blocks, threads, stream, group, call);
    if (value == 2) launch_flat<Bfloat16>(algorithm, blocks, threads, stream, group, call);
  }
  return launched("launching a baseline");
}

// NVSHMEM's own all-reduce over the world; x and out lie in the arena.
int nvrar_library_all_reduce(const void* x, void* out, uint64_t count, int value, cudaStream_t stream) {
  int error = -1;
  if (value == 0) {
    error = nvshmemx_float_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<float*>(out),
                                                static_cast<const float*>(x), count, stream);
  } else if (value == 1) {
    error = nvshmemx_half_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<half*>(out),
                                               static_cast<const half*>(x), count, stream);
  } else if (value == 2) {
    error = nvshmemx_bfloat16_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, static_cast<__nv_bfloat16*>(out),
                                                   static_cast<const __nv_bfloat16*>(x), count, stream);
  }
  return error ? failed("NVSHMEM's all-reduce") : 0;
}

// Lets go of everything; every rank calls this, and nothing may be running.
void nvrar_end() {
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

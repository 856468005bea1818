// The interface between libnvshmem_host 3.x and its transport plugins (version 3.0.0), as far as it is used here.
// NVSHMEM's wheel does not contain its header. Layouts are those of src/include/internal/host_transport/transport.h at
// tag v3.4.5-0. The build fails if the headers have another version of the interface, the start if the library has.
#pragma once
#include <cstddef>
#include <cstdint>

namespace test_transport {

constexpr int kInterfaceVersion = 30000; // the major version, times 10000, must match

enum Capability { kCpuWrite = 1 << 4, kCpuRead = 1 << 5, kCpuAtomics = 1 << 6 };
enum Attribute { kConnected = 1 << 1 };
enum RmaOp { kPut = 1, kP = 2, kPutSignal = 3, kGet = 4, kG = 5 };
enum AmoOp {
  kInc = 2, kSet, kAdd, kAnd, kOr, kXor, kSignal, kSignalSet, kSignalAdd, kEndOfNonfetch,
  kFetch, kFetchInc, kFetchAdd, kFetchAnd, kFetchOr, kFetchXor, kSwap, kCompareSwap
};
static_assert(kSignalSet == 9 && kEndOfNonfetch == 11 && kCompareSwap == 19, "AmoOp");

struct MemHandle {
  char bytes[512];
};
struct PeInfo {
  int pci_device, pci_bus, pci_domain, pe;
  uint64_t host_hash;
  char gpu_uuid[16];
};
struct Bootstrap {
  int version, rank, size, node_rank, node_size;
  int (*allgather)(const void* send, void* receive, int bytes, Bootstrap*);
  int (*alltoall)(const void* send, void* receive, int bytes, Bootstrap*);
  int (*barrier)(Bootstrap*);
  // more fields follow
};
struct RmaVerb {
  int op, nbi, on_stream;
  void* stream;
};
struct RmaSide {
  void* address; // the remote side's is an address of the target process
  uint64_t offset;
  MemHandle* handle;
};
struct RmaBytes {
  size_t count;
  int size;
  ptrdiff_t source_stride, target_stride;
};
struct AmoVerb {
  int op, fetches, has_value, has_compare;
};
struct AmoSide {
  RmaSide remote;
  uint64_t return_flag;
  void *return_address, *value_address, *compare_address;
  uint64_t value, compare;
  MemHandle* return_handle;
};
struct AmoBytes {
  int type, size;
};
static_assert(sizeof(PeInfo) == 40 && offsetof(Bootstrap, allgather) == 24, "PeInfo, Bootstrap");
static_assert(sizeof(RmaVerb) == 24 && sizeof(RmaSide) == 24 && sizeof(RmaBytes) == 32, "RMA");
static_assert(sizeof(AmoVerb) == 16 && sizeof(AmoSide) == 80 && offsetof(AmoSide, value) == 56, "AMO");

struct Transport {
  int api_version, type;
  int* capabilities;
  int (*can_reach_peer)(int* access, PeInfo*, Transport*);
  int (*connect_endpoints)(Transport*, int* devices, int count);
  int (*get_mem_handle)(MemHandle*, void* buffer, size_t size, Transport*, bool local_only);
  int (*release_mem_handle)(MemHandle*, Transport*);
  int (*finalize)(Transport*);
  int (*show_info)(Transport*, int style);
  int (*progress)(Transport*);
  int (*rma)(Transport*, int pe, RmaVerb, RmaSide* remote, RmaSide* local, RmaBytes, int is_proxy);
  int (*amo)(Transport*, int pe, void* unused, AmoVerb, AmoSide*, AmoBytes, int is_proxy);
  int (*fence)(Transport*, int pe, int is_proxy);
  int (*quiet)(Transport*, int pe, int is_proxy);
  int (*enforce_cst)(Transport*);
  int (*enforce_cst_at_target)(Transport*);
  int (*add_device_remote_mem_handles)(Transport*, int, MemHandle*, uint64_t, size_t);
  Bootstrap* bootstrap; // set by the host library after nvshmemt_init
  void *state, *shared_state, *cache;
  char** pci_paths;
  int attributes, devices;
  bool atomics_complete_on_quiet, initialized, no_proxy;
  void* heap;
  size_t log2_granularity;
  uint64_t max_op_bytes;
  uint32_t atomic_host_endian_min_size;
  int index, pe, size;
  void *aliases, *egm;
};
static_assert(sizeof(Transport) == 0xf0 && offsetof(Transport, progress) == 0x40, "Transport");
static_assert(offsetof(Transport, bootstrap) == 0x80 && offsetof(Transport, state) == 0x88, "Transport");
static_assert(offsetof(Transport, attributes) == 0xa8 && offsetof(Transport, initialized) == 0xb1, "Transport");
static_assert(offsetof(Transport, max_op_bytes) == 0xc8 && offsetof(Transport, pe) == 0xd8, "Transport");

} // namespace test_transport

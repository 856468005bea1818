// A transport plugin of NVSHMEM 3.x without a network, for tests: PEs of one machine, also of one GPU, reach each other
// only through NVSHMEM's path GPU -> proxy thread -> transport, as over Slingshot or InfiniBand without IBGDA.
//
// NVSHMEM accepts only the names of its own transports, and finds its own plugin first. So this one has the soname of
// the libfabric plugin and is preloaded (tests/gpu/proxied.py does that):
//   LD_PRELOAD=.../nvshmem_transport_libfabric.so.3 NVSHMEM_REMOTE_TRANSPORT=libfabric NVSHMEM_DISABLE_P2P=1
// With TESTNET_RANKS_PER_NODE instead of NVSHMEM_DISABLE_P2P, NVSHMEM sees a host name per node: it maps the memory of
// peers of a node, and the rest goes through here.
//
// Environment variables (times in microseconds, default 0):
//   TESTNET_DELAY_US      one-way latency, of operations and of their acknowledgements
//   TESTNET_JITTER_US     additional latency, drawn for each piece of an operation
//   TESTNET_OPERATION_US  time that the network needs for an operation before the next one starts
//   TESTNET_HOLD_US       an operation waits up to so long before its source is read
//   TESTNET_REORDER=1     puts overtake puts and atomics; the atomics of one PE to another stay in order
//   TESTNET_IN_ORDER=1    everything stays in order and there is no fence, as with one InfiniBand queue pair. Otherwise
//                         a fence waits for everything before it, as NVSHMEM's libfabric transport does
//   TESTNET_GBPS          gigabits per second between two PEs, 0: no limit
//   TESTNET_CST=1         claim that a target must flush writes, as InfiniBand without GDRCopy does
//   TESTNET_COUNTS=DIR    write the counters of PE n to DIR/n.json at the end
//   TESTNET_SEED, TESTNET_TIMEOUT_S (default 20), TESTNET_HOST_ONLY=1 (no CUDA, for the self-test)
#undef _FORTIFY_SOURCE // its gethostname is not the one that is replaced below
#include "nic.h"

#if __has_include(<non_abi/nvshmem_version.h>)
#include <non_abi/nvshmem_version.h>
static_assert(NVSHMEM_TRANSPORT_PLUGIN_MAJOR_VERSION * 10000 + NVSHMEM_TRANSPORT_PLUGIN_MINOR_VERSION * 100 +
                      NVSHMEM_TRANSPORT_PLUGIN_PATCH_VERSION == test_transport::kInterfaceVersion,
              "NVSHMEM has another transport interface");
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace test_transport {
namespace {

Nic* the_nic = nullptr; // for the functions that get no Transport

Nic& nic_of(Transport* transport) { return *static_cast<Nic*>(transport->state); }

void write_counts() {
  const char* folder = std::getenv("TESTNET_COUNTS");
  if (!the_nic || !folder || the_nic->pe < 0) return;
  std::string path = std::string(folder) + "/" + std::to_string(the_nic->pe) + ".json";
  FILE* file = std::fopen(path.c_str(), "w");
  if (!file) return print("cannot write %s: %m", path.c_str());
  for (int i = 0; i < kCounters; ++i) {
    std::fprintf(file, "%s\"%s\": %llu", i ? ", " : "{", kCounterNames[i],
                 static_cast<unsigned long long>(the_nic->counters[i].load()));
  }
  std::fputs("}\n", file);
  std::fclose(file);
}
__attribute__((destructor)) void at_exit() { write_counts(); } // where nobody called nvshmem_finalize

// Whether the range belongs to the registered memory of that PE.
bool is_registered(const RmaSide& side, int pe, uint64_t bytes) {
  if (!side.handle) return true;
  Registration found;
  std::memcpy(&found, side.handle, sizeof found);
  uint64_t begin = reinterpret_cast<uint64_t>(side.address);
  return found.magic == kMagic && found.pe == pe && begin >= found.begin && begin + bytes <= found.begin + found.bytes;
}

int can_reach_peer(int* access, PeInfo*, Transport*) {
  *access = kCpuWrite | kCpuRead | kCpuAtomics;
  return 0;
}

int connect_endpoints(Transport* transport, int*, int) {
  return nic_of(transport).connect(transport->pe, transport->size, transport->bootstrap) ? 0 : 1;
}

int get_mem_handle(MemHandle* out, void* buffer, size_t bytes, Transport* transport, bool) {
  uint64_t begin = reinterpret_cast<uint64_t>(buffer);
  Registration registration{kMagic, begin, bytes, transport->pe, nic_of(transport).add_region(begin, bytes)};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &registration, sizeof registration);
  return 0;
}

int release_mem_handle(MemHandle* handle, Transport* transport) {
  Registration registration;
  std::memcpy(&registration, handle, sizeof registration);
  nic_of(transport).remove_region(registration.begin);
  return 0;
}

int rma(Transport* transport, int pe, RmaVerb verb, RmaSide* remote, RmaSide* local, RmaBytes what, int is_proxy) {
  Nic& nic = nic_of(transport);
  uint64_t bytes = what.count * uint64_t(what.size);
  if (pe < 0 || pe >= nic.size || !is_registered(*remote, pe, bytes)) {
    print("RMA %d: %llu bytes at %p are not registered by PE %d", verb.op, static_cast<unsigned long long>(bytes),
          remote->address, pe);
    return 1;
  }
  if (is_proxy) nic.count(kFromProxy);
  if (!bytes) return 0;
  auto* operation = new Operation{};
  operation->remote = reinterpret_cast<uint64_t>(remote->address);
  operation->local = reinterpret_cast<uint64_t>(local->address);
  operation->bytes = bytes;
  if (verb.op == kPut) {
    operation->kind = kWrite;
    nic.count(kPuts);
    nic.count(kPutBytes, bytes);
  } else if (verb.op == kP && bytes <= 8) {
    operation->kind = kWrite;
    operation->inlined = true; // the value is on the caller's stack
    std::memcpy(&operation->value, local->address, bytes);
    nic.count(kInlinePuts);
  } else if (verb.op == kGet || verb.op == kG) {
    operation->kind = kRead;
    nic.count(kGets);
  } else {
    print("RMA %d of %llu bytes is not known", verb.op, static_cast<unsigned long long>(bytes));
    delete operation;
    return 1;
  }
  nic.submit(pe, operation);
  return !is_proxy && !verb.nbi && verb.op != kP ? nic.wait_for(pe, "a blocking RMA") : 0;
}

int amo(Transport* transport, int pe, void*, AmoVerb verb, AmoSide* side, AmoBytes what, int is_proxy) {
  Nic& nic = nic_of(transport);
  bool known = verb.op >= kInc && verb.op <= kCompareSwap && verb.op != kEndOfNonfetch;
  bool sized = what.size == 1 || what.size == 2 || what.size == 4 || what.size == 8;
  if (pe < 0 || pe >= nic.size || !known || !sized || !is_registered(side->remote, pe, uint64_t(what.size))) {
    print("atomic %d of %d bytes at %p of PE %d is not possible", verb.op, what.size, side->remote.address, pe);
    return 1;
  }
  if (is_proxy) nic.count(kFromProxy);
  nic.count(kAtomics);
  auto* operation = new Operation{};
  operation->kind = kAtomic;
  operation->op = uint32_t(verb.op);
  operation->remote = reinterpret_cast<uint64_t>(side->remote.address);
  operation->local = verb.op > kEndOfNonfetch ? reinterpret_cast<uint64_t>(side->return_address) : 0;
  operation->bytes = uint64_t(what.size);
  operation->value = side->value;
  operation->compare = side->compare;
  nic.submit(pe, operation);
  return 0;
}

int fence(Transport* transport, int pe, int) {
  nic_of(transport).count(kFences);
  return nic_of(transport).wait_for(pe, "a fence");
}
int quiet(Transport* transport, int pe, int) {
  nic_of(transport).count(kQuiets);
  return nic_of(transport).wait_for(pe, "a quiet");
}
int show_info(Transport*, int) { return 0; }
int do_nothing(Transport*) { return 0; }

int finalize(Transport* transport) {
  nic_of(transport).close_all();
  write_counts();
  the_nic = nullptr;
  delete &nic_of(transport);
  transport->state = nullptr; // the host library looks at the struct again, so it is not freed
  return 0;
}

// The node that this rank belongs to, or -1 if host names are not changed.
int assigned_node() {
  int per_node = int(setting("TESTNET_RANKS_PER_NODE", 0));
  for (const char* name : {"YALIS_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
    const char* rank = per_node > 0 ? std::getenv(name) : nullptr;
    if (rank) return std::atoi(rank) / per_node;
  }
  return -1;
}
bool called_by_nvshmem(void* caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && std::strstr(info.dli_fname, "libnvshmem_host");
}
template <class Function> Function next_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
std::string name_of_node(const char* name, int node) { return std::string(name) + ".node" + std::to_string(node); }

} // namespace
} // namespace test_transport

using namespace test_transport;

// NVSHMEM, and nobody else, sees a host name for each node, and a shared memory for each node if its heap is one.
EXPORTED int gethostname(char* name, size_t length) noexcept {
  static auto next = next_function<int (*)(char*, size_t)>("gethostname");
  int result = next(name, length), node = assigned_node();
  if (result || node < 0 || !called_by_nvshmem(__builtin_return_address(0))) return result;
  size_t used = strnlen(name, length);
  snprintf(name + used, length - used, "-node%d", node);
  return 0;
}
EXPORTED int shm_open(const char* name, int flags, mode_t mode) {
  static auto next = next_function<int (*)(const char*, int, mode_t)>("shm_open");
  int node = assigned_node();
  if (node < 0 || !called_by_nvshmem(__builtin_return_address(0))) return next(name, flags, mode);
  return next(name_of_node(name, node).c_str(), flags, mode);
}
EXPORTED int shm_unlink(const char* name) {
  static auto next = next_function<int (*)(const char*)>("shm_unlink");
  int node = assigned_node();
  if (node < 0 || !called_by_nvshmem(__builtin_return_address(0))) return next(name);
  return next(name_of_node(name, node).c_str());
}

// On every node one PE asks the MPS daemon for its servers, through nvidia-cuda-mps-control. Here all nodes have the same
// daemon, which serves one client at a time, and NVSHMEM exits if it gets no answer. So they ask one after another.
EXPORTED FILE* popen(const char* command, const char* mode) {
  static auto next = next_function<FILE* (*)(const char*, const char*)>("popen");
  if (assigned_node() < 0 || !called_by_nvshmem(__builtin_return_address(0))) return next(command, mode);
  std::string lock = "/tmp/testnet." + std::to_string(getuid()) + ".lock";
  return next(("env -u LD_PRELOAD flock " + lock + " sh -c '" + command + "'").c_str(), mode);
}

EXPORTED int nvshmemt_init(Transport** out, void*, int api_version) {
  if (api_version / 10000 != kInterfaceVersion / 10000) {
    print("NVSHMEM has transport interface %d, this plugin has %d", api_version, kInterfaceVersion);
    return 1;
  }
  auto* transport = static_cast<Transport*>(std::calloc(1, sizeof(Transport)));
  auto* nic = new Nic;
  nic->open();
  transport->state = the_nic = nic;
  transport->can_reach_peer = can_reach_peer;
  transport->connect_endpoints = connect_endpoints;
  transport->get_mem_handle = get_mem_handle;
  transport->release_mem_handle = release_mem_handle;
  transport->finalize = finalize;
  transport->show_info = show_info;
  transport->rma = rma;
  transport->amo = amo;
  transport->fence = nic->settings.in_order ? nullptr : fence;
  transport->quiet = quiet;
  transport->enforce_cst = do_nothing;
  transport->enforce_cst_at_target = setting("TESTNET_CST", 0) != 0 ? do_nothing : nullptr;
  transport->attributes = kConnected;
  transport->max_op_bytes = uint64_t(1) << 30;
  transport->atomics_complete_on_quiet = true; // as over libfabric
  transport->api_version = kInterfaceVersion;
  transport->initialized = true;
  *out = transport;
  return 0;
}

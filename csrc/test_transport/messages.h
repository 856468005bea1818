// What travels between processes: pieces of operations in slots of shared memory.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>

#include "basics.h"
#include "nvshmem_interface.h"

namespace test_transport {

enum Kind : uint32_t { kWrite, kRead, kAtomic };
// A slot goes through these states. The sender sets kFilling and kFull, the receiver kDone, the sender kFree again.
enum SlotState : uint32_t { kFree, kFilling, kFull, kDone };

constexpr uint64_t kMagic = 0x74657374206e6574u;
constexpr uint32_t kSlots = 32;         // pieces in flight between two PEs
constexpr uint32_t kPieceBytes = 16384; // the largest piece
constexpr uint32_t kSplitBytes = 2048;  // the largest piece while puts are reordered; sizes then vary

struct alignas(128) Slot {
  std::atomic<uint32_t> state;
  uint32_t kind;
  uint64_t number;        // of the pieces between these two PEs
  uint64_t atomic_number; // of the atomics among them
  uint64_t due, done;     // when it may arrive, and when it did
  uint64_t address;       // in the target process
  uint32_t bytes, op;
  uint64_t value, compare, old;
};
struct alignas(128) Ring {
  std::atomic<uint64_t> posted; // pieces so far
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free, "shared");

constexpr size_t round_up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// The shared memory of one receiver: for each sender a ring, its slots and their payloads.
struct Inbox {
  struct Header {
    uint64_t magic;
    uint32_t size;
  };
  char* base = nullptr;
  size_t bytes = 0;
  bool pinned = false;

  static constexpr size_t kSlotBytes = round_up(sizeof(Ring) + kSlots * sizeof(Slot));
  static constexpr size_t kRingBytes = kSlotBytes + round_up(size_t(kSlots) * kPieceBytes);
  static size_t total_bytes(int size) { return 4096 + size_t(size) * kRingBytes; }

  Header& header() const { return *reinterpret_cast<Header*>(base); }
  Ring& ring(int sender) const { return *reinterpret_cast<Ring*>(base + 4096 + size_t(sender) * kRingBytes); }
  Slot& slot(int sender, uint32_t i) const { return reinterpret_cast<Slot*>(&ring(sender) + 1)[i]; }
  char* payload(int sender, uint32_t i) const {
    return reinterpret_cast<char*>(&ring(sender)) + kSlotBytes + size_t(i) * kPieceBytes;
  }

  bool map(const char* name, size_t size) {
    int file = shm_open(name, O_RDWR, 0600);
    void* at = file < 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) return false;
    base = static_cast<char*>(at);
    bytes = size;
    return true;
  }
};

// An operation of this PE until its last piece is acknowledged. The sender thread owns it.
struct Operation {
  Kind kind;
  uint32_t op = 0;
  uint64_t local = 0, remote = 0; // of an atomic, `local` is where the old value goes, or 0
  uint64_t bytes = 0, sent = 0, acknowledged = 0;
  bool inlined = false; // `value` holds the data
  uint64_t value = 0, compare = 0;
  uint64_t ready = 0; // when its source may be read
};

// Memory that NVSHMEM has registered. This is in the first bytes of its MemHandle.
struct Registration {
  uint64_t magic, begin, bytes;
  int32_t pe;
  uint32_t host;
};
static_assert(sizeof(Registration) <= sizeof(MemHandle), "Registration");

inline bool needs_old_value(uint32_t op) { return op != kSet && op != kSignal && op != kSignalSet; }

// Returns the new value of an atomic, and whether it is written.
inline uint64_t apply(uint32_t op, uint64_t old, uint64_t value, uint64_t compare, bool& writes) {
  writes = true;
  switch (op) {
    case kInc: case kFetchInc: return old + 1;
    case kSet: case kSignal: case kSignalSet: case kSwap: return value;
    case kAdd: case kSignalAdd: case kFetchAdd: return old + value;
    case kAnd: case kFetchAnd: return old & value;
    case kOr: case kFetchOr: return old | value;
    case kXor: case kFetchXor: return old ^ value;
    case kCompareSwap: writes = old == compare; return value;
    case kFetch: writes = false; return old;
  }
  fatal("an atomic", "unknown operation");
}

} // namespace test_transport

// The network of one PE, done by two threads as a NIC would: the sender reads sources and writes pieces into slots of
// the target's shared memory, the target's receiver carries them into its symmetric heap. Both use copy engines, never
// kernels or peer access, so kernels that wait do not stand in the way. A heap in host memory needs no CUDA call.
#pragma once
#include <cerrno>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver.h"
#include "messages.h"

namespace test_transport {

enum Counter {
  kPuts, kPutBytes, kInlinePuts, kGets, kAtomics, kFences, kQuiets, kFromProxy, kPieces, kDelivered, kOvertaken,
  kAtomicsEarly, kCounters
};
constexpr const char* kCounterNames[kCounters] = {"puts", "put_bytes", "inline_puts", "gets", "atomics", "fences",
                                                  "quiets", "from_proxy", "pieces", "delivered", "overtaken",
                                                  "atomics_early"};

// From environment variables, see plugin.cpp. Times are in nanoseconds.
struct Settings {
  uint64_t delay = microseconds("TESTNET_DELAY_US"), jitter = microseconds("TESTNET_JITTER_US");
  uint64_t per_operation = microseconds("TESTNET_OPERATION_US"), hold = microseconds("TESTNET_HOLD_US");
  bool in_order = setting("TESTNET_IN_ORDER", 0) != 0;
  bool reorder = !in_order && setting("TESTNET_REORDER", 0) != 0;
  double gbps = setting("TESTNET_GBPS", 0);
  uint64_t seed = uint64_t(setting("TESTNET_SEED", 1));
  uint64_t timeout = uint64_t(setting("TESTNET_TIMEOUT_S", 20) * 1e9);
  bool host_only = setting("TESTNET_HOST_ONLY", 0) != 0; // all memory is host memory, for the self-test
};

class Nic {
public:
  const Settings settings;
  int pe = -1, size = 0;
  std::atomic<uint64_t> counters[kCounters] = {};

  void count(Counter what, uint64_t by = 1) { counters[what].fetch_add(by, std::memory_order_relaxed); }

  void open() {
    if (!settings.host_only) driver_.open();
  }

  // Collective: exchanges shared memory with all PEs and starts the threads.
  bool connect(int own, int count_of_pes, Bootstrap* bootstrap) {
    pe = own, size = count_of_pes, own_pe = own;
    if (!settings.host_only) {
      driver_.check(driver_.get_current(&driver_.context), "cuCtxGetCurrent");
      if (!driver_.context) return print("NVSHMEM's thread has no CUDA context"), false;
    }
    char name[64] = {};
    snprintf(name, sizeof name, "/testnet.%d.%d.%llx", int(getpid()), pe, static_cast<unsigned long long>(now_ns()));
    size_t bytes = Inbox::total_bytes(size);
    int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    int error = file < 0 ? errno : posix_fallocate(file, 0, off_t(bytes));
    if (file >= 0) close(file);
    if (error) return print("no %zu bytes of shared memory: %s; see df /dev/shm", bytes, strerror(error)), false;
    std::vector<char> names(sizeof name * size_t(size));
    if (bootstrap->allgather(name, names.data(), sizeof name, bootstrap)) return false;
    inboxes_.resize(size_t(size));
    for (int other = 0; other < size; ++other) {
      Inbox& inbox = inboxes_[size_t(other)];
      if (!inbox.map(&names[sizeof name * size_t(other)], bytes)) {
        return print("mapping the memory of PE %d: %m", other), false;
      }
      if (other == pe) inbox.header() = {kMagic, uint32_t(size)};
    }
    if (bootstrap->barrier(bootstrap)) return false;
    shm_unlink(name);
    for (Inbox& inbox : inboxes_) {
      if (inbox.header().magic != kMagic || inbox.header().size != uint32_t(size)) return print("a PE differs"), false;
      if (settings.host_only) continue;
      inbox.pinned = driver_.pin(inbox.base, inbox.bytes, Driver::kPortable) == Driver::kSuccess;
    }
    outstanding_ = std::vector<std::atomic<int64_t>>(size_t(size));
    sender_ = std::thread([this] { send_loop(); });
    receiver_ = std::thread([this] { receive_loop(); });
    return true;
  }

  void close_all() {
    if (sender_.joinable()) {
      stop_ = true;
      sender_.join();
      receiver_.join();
    }
    for (Inbox& inbox : inboxes_) {
      if (inbox.pinned) driver_.unpin(inbox.base);
      if (inbox.base) munmap(inbox.base, inbox.bytes);
    }
    inboxes_.clear();
  }

  bool is_host(uint64_t address) {
    if (settings.host_only) return true;
    {
      std::lock_guard<std::mutex> lock(regions_lock_);
      for (const Region& region : regions_) {
        if (address >= region.begin && address < region.end) return region.host;
      }
    }
    return driver_.is_host(address);
  }
  bool add_region(uint64_t begin, uint64_t bytes) {
    bool host = settings.host_only || driver_.is_host(begin);
    std::lock_guard<std::mutex> lock(regions_lock_);
    regions_.push_back({begin, begin + bytes, host});
    return host;
  }
  void remove_region(uint64_t begin) {
    std::lock_guard<std::mutex> lock(regions_lock_);
    auto is_it = [&](const Region& region) { return region.begin == begin; };
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(), is_it), regions_.end());
  }

  void submit(int to, Operation* operation) {
    outstanding_[size_t(to)].fetch_add(1, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(submitted_lock_);
    submitted_.push_back({to, operation});
    submitted_count_.fetch_add(1, std::memory_order_release);
  }

  // Waits until all operations to a PE are acknowledged. Returns 1 after the timeout.
  int wait_for(int to, const char* what) {
    std::atomic<int64_t>& outstanding = outstanding_[size_t(to)];
    uint64_t start = now_ns();
    for (uint64_t round = 1; outstanding.load(std::memory_order_acquire) > 0; ++round) {
      __builtin_ia32_pause();
      if (round % 1024) continue;
      sched_yield();
      if (now_ns() - start < settings.timeout) continue;
      print("%s: %lld operations to PE %d were not acknowledged in time", what,
            static_cast<long long>(outstanding.load()), to);
      return 1;
    }
    return 0;
  }

private:
  struct Region {
    uint64_t begin, end;
    bool host;
  };
  struct Flight { // a piece on its way
    Operation* operation;
    uint64_t offset;
    uint32_t slot;
  };
  struct Arrival {
    int sender;
    uint32_t slot;
    uint64_t number, atomic_number;
    bool atomic;
  };
  static constexpr size_t kMaxBatch = 64;

  Driver driver_;
  std::vector<Inbox> inboxes_; // of every PE
  std::mutex regions_lock_, submitted_lock_;
  std::vector<Region> regions_;
  std::deque<std::pair<int, Operation*>> submitted_; // by NVSHMEM's threads, for the sender
  std::atomic<uint64_t> submitted_count_{0};
  std::vector<std::atomic<int64_t>> outstanding_; // operations by target
  std::atomic<bool> stop_{false};
  std::thread sender_, receiver_;

  // Copies return whether something was queued on the stream.
  bool copy_in(uint64_t to, const void* from, size_t bytes, Driver::Handle stream) {
    if (is_host(to)) return copy_words(reinterpret_cast<void*>(to), from, bytes), false;
    driver_.check(driver_.copy_to_device(to, from, bytes, stream), "a copy to the device");
    return true;
  }
  bool copy_out(void* to, uint64_t from, size_t bytes, Driver::Handle stream) {
    if (is_host(from)) return copy_words(to, reinterpret_cast<const void*>(from), bytes), false;
    driver_.check(driver_.copy_to_host(to, from, bytes, stream), "a copy from the device");
    return true;
  }
  void finish_copies(Driver::Handle stream, bool& queued) {
    if (!queued) return;
    queued = false;
    uint64_t start = now_ns();
    for (uint64_t round = 1;; ++round) {
      Driver::Result result = driver_.query_stream(stream);
      if (result == Driver::kSuccess) return;
      if (result != Driver::kNotReady) fatal("a copy", driver_.name(result));
      if (round % 256 == 0 && now_ns() - start > settings.timeout) {
        fatal("a copy", "did not end in time; a kernel that is loaded lazily blocks the driver while another one waits "
                        "(CUDA_MODULE_LOADING=EAGER)");
      }
    }
  }

  // ---- the sender

  struct Sender {
    explicit Sender(const Nic& nic)
        : random(nic.settings.seed * 1000 + uint64_t(nic.pe)), waiting(size_t(nic.size)), flying(size_t(nic.size)),
          next(size_t(nic.size)), next_atomic(size_t(nic.size)), line_free(size_t(nic.size)) {}
    Random random;
    std::vector<std::deque<Operation*>> waiting;
    std::vector<std::vector<Flight>> flying;
    std::vector<uint64_t> next, next_atomic, line_free;
    uint64_t taken = 0, nic_free = 0;
    Driver::Handle stream = nullptr;
    bool queued = false;
  };

  void send_loop() {
    Sender self(*this);
    if (!settings.host_only) self.stream = driver_.enter_thread();
    Backoff backoff;
    while (!stop_.load(std::memory_order_relaxed)) {
      take_submitted(self);
      bool busy = send_pieces(self);
      busy |= handle_acknowledgements(self);
      backoff.tick(busy);
    }
    if (self.stream) driver_.destroy_stream(self.stream);
  }

  void take_submitted(Sender& self) {
    if (submitted_count_.load(std::memory_order_acquire) == self.taken) return;
    std::deque<std::pair<int, Operation*>> fresh;
    {
      std::lock_guard<std::mutex> lock(submitted_lock_);
      fresh.swap(submitted_);
    }
    for (auto& [to, operation] : fresh) {
      uint64_t now = settings.hold || settings.per_operation ? now_ns() : 0;
      operation->ready = settings.hold ? now + self.random.below(settings.hold) : 0;
      if (settings.per_operation) { // one operation after another, whatever its target
        self.nic_free = std::max(self.nic_free, now) + settings.per_operation;
        operation->ready = std::max(operation->ready, self.nic_free);
      }
      self.waiting[size_t(to)].push_back(operation);
    }
    self.taken += fresh.size();
  }

  bool send_pieces(Sender& self) {
    std::vector<std::pair<int, uint32_t>> batch;
    for (int to = 0; to < size; ++to) {
      auto& waiting = self.waiting[size_t(to)];
      while (!waiting.empty() && batch.size() < kMaxBatch) {
        Operation& operation = *waiting.front();
        if (operation.ready && operation.ready > now_ns()) break;
        uint32_t i = uint32_t(self.next[size_t(to)] % kSlots);
        Slot& slot = inboxes_[size_t(to)].slot(pe, i);
        if (slot.state.load(std::memory_order_acquire) != kFree) break;
        slot.state.store(kFilling, std::memory_order_relaxed);
        fill(self, to, i, slot, operation);
        batch.push_back({to, i});
        if (operation.sent == operation.bytes) waiting.pop_front();
      }
    }
    if (batch.empty()) return false;
    finish_copies(self.stream, self.queued);
    uint64_t now = now_ns();
    for (auto [to, i] : batch) {
      Slot& slot = inboxes_[size_t(to)].slot(pe, i);
      uint64_t leaves = now;
      if (settings.gbps > 0) {
        uint64_t& free = self.line_free[size_t(to)];
        leaves = free = std::max(free, now) + uint64_t((slot.bytes + 64) * 8 / settings.gbps);
      }
      slot.due = leaves + settings.delay + self.random.below(settings.jitter);
      uint64_t number = slot.number;
      slot.state.store(kFull, std::memory_order_release);
      inboxes_[size_t(to)].ring(pe).posted.store(number + 1, std::memory_order_release);
    }
    count(kPieces, batch.size());
    return true;
  }

  void fill(Sender& self, int to, uint32_t i, Slot& slot, Operation& operation) {
    uint64_t most = kPieceBytes;
    if (settings.reorder) most = kSplitBytes - 8 * self.random.below(kSplitBytes / 16);
    uint64_t bytes = std::min(operation.bytes - operation.sent, most);
    slot.kind = operation.kind;
    slot.number = self.next[size_t(to)]++;
    slot.atomic_number = operation.kind == kAtomic ? self.next_atomic[size_t(to)]++ : 0;
    slot.address = operation.remote + operation.sent;
    slot.bytes = uint32_t(bytes);
    slot.op = operation.op;
    slot.value = operation.value;
    slot.compare = operation.compare;
    char* payload = inboxes_[size_t(to)].payload(pe, i);
    if (operation.kind == kWrite && operation.inlined) {
      std::memcpy(payload, &operation.value, bytes);
    } else if (operation.kind == kWrite) {
      self.queued |= copy_out(payload, operation.local + operation.sent, bytes, self.stream);
    }
    self.flying[size_t(to)].push_back({&operation, operation.sent, i});
    operation.sent += bytes;
  }

  bool handle_acknowledgements(Sender& self) {
    std::vector<std::pair<int, Flight>> landed;
    uint64_t now = 0;
    for (int to = 0; to < size; ++to) {
      auto& flying = self.flying[size_t(to)];
      size_t kept = 0;
      for (Flight flight : flying) {
        Slot& slot = inboxes_[size_t(to)].slot(pe, flight.slot);
        bool done = slot.state.load(std::memory_order_acquire) == kDone;
        if (done && !now) now = now_ns();
        if (!done || now < slot.done + settings.delay) {
          flying[kept++] = flight;
          continue;
        }
        char* payload = inboxes_[size_t(to)].payload(pe, flight.slot);
        const Operation& operation = *flight.operation;
        if (operation.kind == kRead) {
          self.queued |= copy_in(operation.local + flight.offset, payload, slot.bytes, self.stream);
        } else if (operation.kind == kAtomic && operation.local) {
          std::memcpy(payload, &slot.old, 8);
          self.queued |= copy_in(operation.local, payload, slot.bytes, self.stream);
        }
        landed.push_back({to, flight});
      }
      flying.resize(kept);
    }
    if (landed.empty()) return false;
    finish_copies(self.stream, self.queued);
    for (auto& [to, flight] : landed) {
      Slot& slot = inboxes_[size_t(to)].slot(pe, flight.slot);
      Operation* operation = flight.operation;
      operation->acknowledged += slot.bytes;
      slot.state.store(kFree, std::memory_order_release);
      if (operation->acknowledged < operation->bytes) continue;
      delete operation;
      outstanding_[size_t(to)].fetch_sub(1, std::memory_order_release);
    }
    return true;
  }

  // ---- the receiver

  struct Receiver {
    explicit Receiver(const Nic& nic)
        : random(nic.settings.seed * 1000 + 500 + uint64_t(nic.pe)), executed(size_t(nic.size)),
          next_atomic(size_t(nic.size)), highest(size_t(nic.size)) {}
    Random random;
    std::vector<uint64_t> executed, next_atomic, highest; // by sender
    Driver::Handle stream = nullptr;
    bool queued = false;
  };

  void receive_loop() {
    Receiver self(*this);
    if (!settings.host_only) self.stream = driver_.enter_thread();
    Backoff backoff;
    while (!stop_.load(std::memory_order_relaxed)) {
      std::vector<Arrival> batch = settings.reorder ? find_any(self) : find_in_order(self);
      for (const Arrival& arrival : batch) execute(self, arrival);
      finish_copies(self.stream, self.queued);
      uint64_t now = batch.empty() ? 0 : now_ns();
      for (const Arrival& arrival : batch) {
        size_t from = size_t(arrival.sender);
        if (arrival.number + 1 < self.highest[from]) count(kOvertaken);
        self.highest[from] = std::max(self.highest[from], arrival.number + 1);
        if (arrival.atomic) ++self.next_atomic[from];
        if (arrival.atomic && self.executed[from] < arrival.number) count(kAtomicsEarly);
        ++self.executed[from];
        Slot& slot = inboxes_[size_t(pe)].slot(arrival.sender, arrival.slot);
        slot.done = now;
        slot.state.store(kDone, std::memory_order_release);
      }
      count(kDelivered, batch.size());
      backoff.tick(!batch.empty());
    }
    if (self.stream) driver_.destroy_stream(self.stream);
  }

  std::vector<Arrival> find_in_order(Receiver& self) {
    std::vector<Arrival> batch;
    for (int from = 0; from < size; ++from) {
      uint64_t posted = inboxes_[size_t(pe)].ring(from).posted.load(std::memory_order_acquire);
      uint64_t now = posted > self.executed[size_t(from)] ? now_ns() : 0;
      for (uint64_t n = self.executed[size_t(from)]; n < posted && batch.size() < kMaxBatch; ++n) {
        uint32_t i = uint32_t(n % kSlots);
        Slot& slot = inboxes_[size_t(pe)].slot(from, i);
        if (slot.due > now) break;
        batch.push_back({from, i, n, slot.atomic_number, slot.kind == kAtomic});
      }
    }
    return batch;
  }

  // Everything that is due, in random order. Only the atomics of one sender stay in their order.
  std::vector<Arrival> find_any(Receiver& self) {
    std::vector<Arrival> batch;
    uint64_t now = now_ns();
    for (int from = 0; from < size; ++from) {
      uint64_t posted = inboxes_[size_t(pe)].ring(from).posted.load(std::memory_order_acquire);
      if (posted == self.executed[size_t(from)]) continue;
      std::vector<Arrival> found;
      for (uint32_t i = 0; i < kSlots; ++i) {
        Slot& slot = inboxes_[size_t(pe)].slot(from, i);
        if (slot.state.load(std::memory_order_acquire) != kFull || slot.due > now) continue;
        found.push_back({from, i, slot.number, slot.atomic_number, slot.kind == kAtomic});
      }
      std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.number < b.number; });
      uint64_t expected = self.next_atomic[size_t(from)];
      for (const Arrival& arrival : found) {
        if (arrival.atomic && arrival.atomic_number != expected) continue; // an earlier one is still on its way
        expected += arrival.atomic;
        batch.push_back(arrival);
      }
    }
    for (size_t i = batch.size(); i > 1; --i) std::swap(batch[i - 1], batch[self.random.below(i)]);
    std::vector<size_t> places;
    std::vector<Arrival> atomics;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (!batch[i].atomic) continue;
      places.push_back(i);
      atomics.push_back(batch[i]);
    }
    std::stable_sort(atomics.begin(), atomics.end(),
                     [](auto& a, auto& b) { return a.atomic_number < b.atomic_number; });
    for (size_t i = 0; i < places.size(); ++i) batch[places[i]] = atomics[i];
    return batch;
  }

  void execute(Receiver& self, const Arrival& arrival) {
    Slot& slot = inboxes_[size_t(pe)].slot(arrival.sender, arrival.slot);
    char* payload = inboxes_[size_t(pe)].payload(arrival.sender, arrival.slot);
    auto in = [&] { self.queued |= copy_in(slot.address, payload, slot.bytes, self.stream); };
    auto out = [&] { self.queued |= copy_out(payload, slot.address, slot.bytes, self.stream); };
    if (slot.kind == kWrite) return in();
    if (slot.kind == kRead) return out();
    uint64_t mask = slot.bytes >= 8 ? ~uint64_t(0) : (uint64_t(1) << 8 * slot.bytes) - 1, old = 0;
    if (needs_old_value(slot.op)) {
      out();
      finish_copies(self.stream, self.queued);
      std::memcpy(&old, payload, slot.bytes);
    }
    bool writes;
    uint64_t result = apply(slot.op, old & mask, slot.value & mask, slot.compare & mask, writes);
    slot.old = old & mask;
    if (!writes) return;
    std::memcpy(payload, &result, 8); // stays until the slot is free again
    in();
  }
};

} // namespace test_transport

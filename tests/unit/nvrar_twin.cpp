// Runs the kernels of csrc/nvrar on the CPU. Every thread of every block of every rank is a fiber of one process. A
// seeded scheduler picks the fiber that runs next, and the 8 bytes of a put or store that arrive next. So a seed
// reproduces a run exactly, and a deadlock is detected.
//
// Usage: nvrar_twin nodes=2,2 ops=200 seed=1 ... On failure it prints the reason and returns 1. Faults of the network:
// torn=1 delivers the words of a put in halves, early=1 delivers signals of puts before their data, replay=1 delivers
// words of a put twice; whole=1 delivers whole lines of 128 bytes. tear=ROUNDS runs the tear test instead of operations
// and prints the number of torn lines. host_heap=1: puts read memory as the host sees it, where stores of the GPU arrive late.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "allreduce.h"
#include "baselines.h"
#include "group_setup.h"
#include "tear_test.h"

namespace {

using namespace nvrar;

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Random {
  uint64_t state;
  uint64_t next() { return mix(state++); }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

std::map<std::string, std::string> arguments;
long option(const char* name, long fallback) {
  return arguments.count(name) ? std::stol(arguments[name]) : fallback;
}

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

// ---- fibers

struct Fiber {
  ucontext_t context;
  jmp_buf position;
  std::vector<char> stack;
  std::function<void()> body;
  int rank = 0;
  bool started = false, finished = false;
};

jmp_buf scheduler;
Fiber* running = nullptr;
Random rng{0};

void enter() {
  running->body();
  running->finished = true;
  _longjmp(scheduler, 1);
}

void yield() {
  if (_setjmp(running->position) == 0) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  running = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.position, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&fiber.context, enter, 0);
  setcontext(&fiber.context);
}

struct Arena {
  std::vector<char> bytes;
  std::map<const char*, uint64_t> late; // words as the host sees them, where it does not see the newest store yet
  char* base() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.data()) + 255) & ~uintptr_t(255)); }
};
std::vector<Arena> arenas;

// What a put reads: 8 bytes of some rank's arena, as the host sees them.
uint64_t read_source(const char* from) {
  uint64_t value;
  std::memcpy(&value, from, 8);
  for (auto& arena : arenas) {
    auto found = arena.late.find(from);
    if (found != arena.late.end()) return found->second;
  }
  return value;
}

// ---- the network: delivers 8 bytes at a time, in any order

struct Message {
  char* to;
  const char* from; // source of a put, read at arrival; null for a store, which carries `value`
  uint64_t value;
  std::shared_ptr<int> pending; // items that must arrive before the signal that follows them
  bool signal, by_put;
  int bytes = 8;
  bool replayed = false; // a late second delivery, for which nothing waits
};
std::vector<Message> in_flight;
struct Faults {
  bool torn, early, replay, whole;
} faults{};

void deliver(size_t index) {
  Message message = in_flight[index];
  bool early = faults.early && message.by_put;
  if (message.signal && *message.pending > 0 && !early) return;
  if (message.replayed && rng.below(500)) return; // long after the first delivery
  in_flight[index] = in_flight.back();
  in_flight.pop_back();
  if (message.from && faults.torn && message.bytes == 8) { // one half now, the other later
    int half = rng.below(2) ? 4 : 0;
    std::memcpy(message.to + half, message.from + half, 4);
    message.from += 4 - half, message.to += 4 - half, message.bytes = 4;
    in_flight.push_back(message);
    return;
  }
  if (message.bytes == kLineBytes) {
    std::memcpy(message.to, message.from, kLineBytes);
    --*message.pending;
    return;
  }
  if (message.from && message.bytes == 8) message.value = read_source(message.from);
  if (message.from && message.bytes == 4) std::memcpy(&message.value, message.from, 4);
  std::memcpy(message.to, &message.value, message.bytes);
  if (!message.signal && !message.replayed) --*message.pending;
  if (message.from && faults.replay && !message.replayed && rng.below(8) == 0) {
    message.replayed = true; // a duplicate of the packet: it has the bytes of the first delivery
    message.from = nullptr;
    in_flight.push_back(message);
  }
}

void post(Message message) {
  if (!message.signal) ++*message.pending;
  in_flight.push_back(message);
  if (rng.below(4) == 0) deliver(in_flight.size() - 1);
}

// ---- a rank

struct Barrier {
  int size = 0, waiting = 0;
  uint64_t generation = 0;
  void wait() {
    uint64_t entered = generation;
    if (++waiting == size) {
      waiting = 0;
      ++generation;
      return;
    }
    while (generation == entered) yield();
  }
};

struct Block {
  Barrier barrier;
  std::shared_ptr<int> stores = std::make_shared<int>(0); // to peers, in flight
  std::shared_ptr<int> put_pending;
  std::vector<float> parts;
};

uint64_t ticks = 0;

bool torn_lines_are_counted = false; // the tear test runs

struct TwinTransport {
  int rank_, thread_, threads_, block_, blocks_;
  Block* shared;

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  void sync() { shared->barrier.wait(); }

  bool is_own(const void* address) const {
    const char* byte = static_cast<const char*>(address);
    return byte >= arenas[rank_].base() && byte < arenas[rank_].base() + arenas[rank_].bytes.size() - 256;
  }
  void store8(char* to, uint64_t value) {
    if (is_own(to)) {
      if (option("host_heap", 0)) {
        uint64_t before;
        std::memcpy(&before, to, 8);
        arenas[rank_].late.emplace(to, before); // keeps what the host saw first
      }
      std::memcpy(to, &value, 8);
    } else {
      post(Message{to, nullptr, value, shared->stores, false, false});
    }
  }
  LLLine load_line(const LLLine* from) {
    if (rng.below(16) == 0) yield();
    return *from;
  }
  void store_line(LLLine* to, LLLine line) {
    for (int i = 0; i < 2; ++i) store8(reinterpret_cast<char*>(to) + 8 * i, line.word[i]);
    if (rng.below(8) == 0) yield();
  }
  Pack load_data(const Pack* from) { return *from; }
  void store_data(Pack* to, Pack pack) {
    store8(reinterpret_cast<char*>(to), uint64_t(pack.word[1]) << 32 | pack.word[0]);
    store8(reinterpret_cast<char*>(to) + 8, uint64_t(pack.word[3]) << 32 | pack.word[2]);
    if (rng.below(8) == 0) yield();
  }
  void store_word(uint64_t* to, uint64_t value) { store8(reinterpret_cast<char*>(to), value); }
  uint64_t load_signal(const uint64_t* from) {
    if (torn_lines_are_counted && rng.below(16) == 0) yield(); // between the words of a line
    return *from;
  }
  void store_signal(uint64_t* to, uint64_t value) {
    post(Message{reinterpret_cast<char*>(to), nullptr, value, shared->stores, true, false});
  }
  void release_sources() {
    if (thread_ == 0) arenas[rank_].late.clear();
    sync();
  }
  // As on the GPU, each thread copies some of the bytes without waiting for the others.
  void copy(char* to, const char* from, uint64_t bytes, int pe, const std::shared_ptr<int>& pending) {
    if (!is_own(to)) fail("a put to an address that is not symmetric");
    char* target = arenas[pe].base() + (to - arenas[rank_].base());
    uint64_t each = faults.whole ? kLineBytes : 8;
    for (uint64_t i = each * thread_; i < bytes; i += each * threads_) {
      post(Message{target + i, from + i, 0, pending, false, true, int(each)});
    }
    if (rng.below(2)) yield();
  }
  void put(char* to, const char* from, uint64_t bytes, int pe) {
    copy(to, from, bytes, pe, std::make_shared<int>(0));
  }
  void put_signal(char* to, const char* from, uint64_t bytes, uint64_t* signal, uint64_t value, int pe) {
    if (thread_ == 0) shared->put_pending = std::make_shared<int>(0);
    sync();
    copy(to, from, bytes, pe, shared->put_pending);
    sync();
    char* target = arenas[pe].base() + (reinterpret_cast<char*>(signal) - arenas[rank_].base());
    if (thread_ == 0) post(Message{target, nullptr, value, shared->put_pending, true, true});
  }
  void acquire_put(uint64_t*, uint64_t) {} // this network never delivers a signal before its data
  uint32_t fetch_increment(uint32_t* counter) { return (*counter)++; }
  void advance_generation(uint32_t* generation) { ++*generation; }
  uint32_t load_generation(const uint32_t* from) { return *from; }
  float rsqrt(float value) { return 1 / std::sqrt(value); }
  float block_sum(float value) {
    shared->parts.resize(threads_);
    shared->parts[thread_] = value;
    sync();
    float total = 0;
    for (float part : shared->parts) total += part;
    sync();
    return total;
  }
  uint64_t now() { return ticks; }
  void pause() { yield(); }
  bool should_stop(const GroupState* state, const Status* status) { return state->aborted || status->stop; }
  void report_timeout(GroupState* state, Status* status, int group, uint64_t sequence, WaitSite site) {
    if (state->aborted++) return;
    *status = Status{0, 1, uint32_t(group), uint32_t(site.phase), uint32_t(site.step), uint32_t(site.peer), sequence};
  }
};

// ---- operations and checks

struct Member {
  Group group{};
  FlatGroup ring{}, shot{};
  GroupState state{}, ring_state{}, shot_state{};
};

// The parameters of one operation, the same on all ranks.
struct Work {
  int group, dtype, protocol, algorithm; // protocol 0: LL, 1: put-with-signal, 2: lines; algorithm 0: nvrar, 1: ring, 2: one-shot
  int schedule;                          // of nvrar, see enum Schedule
  bool integers, in_place;               // integers: their sum is exact
  uint64_t count;
  uint32_t chunk, shift, width;
  float input(uint64_t seed, int rank, uint64_t i) const {
    uint64_t bits = mix(seed + mix(rank + 1000 * i));
    return integers ? float(int(bits % 9) - 4) : float(double(bits >> 11) / (1ull << 53) - 0.5);
  }
};

int dtype_bytes(int dtype) { return dtype == 0 ? 4 : 2; }
float read_value(int dtype, const char* from) {
  uint32_t bits = 0;
  std::memcpy(&bits, from, dtype_bytes(dtype));
  return dtype == 0 ? Float32::to_float(bits) : dtype == 1 ? Float16::to_float(bits) : Bfloat16::to_float(bits);
}
void write_value(int dtype, char* to, float value) {
  uint32_t bits = dtype == 0   ? Float32::from_float(value)
                  : dtype == 1 ? uint32_t(Float16::from_float(value))
                               : uint32_t(Bfloat16::from_float(value));
  std::memcpy(to, &bits, dtype_bytes(dtype));
}

struct Rank {
  std::deque<Member> members; // one per set of groups; a deque, because groups point to their states
  std::vector<Block> blocks;
  Barrier stream;
  Status status{};
  std::vector<char> x, out, residual, summed, normed, weight;
  KernelArgs args{};
};

std::vector<Rank> ranks;
std::vector<std::vector<int>> colors; // the group of each rank, for each set of groups (as in MPI_Comm_split)
std::vector<int32_t> node_of;
std::map<std::pair<int, int>, uint64_t> digests; // (operation, group) -> digest of the first rank that finished it
uint32_t torn_lines = 0;
long checked = 0, capacity, max_count, ops, seed;

std::vector<int32_t> members_of(int set, int rank) {
  std::vector<int32_t> found;
  for (int other = 0; other < int(ranks.size()); ++other) {
    if (colors[set][other] == colors[set][rank]) found.push_back(other);
  }
  return found;
}

Work draw_work(int op) {
  Random random{mix(seed * 1000003 + op)};
  Work work{};
  work.group = int(random.below(colors.size()));
  work.dtype = int(option("dtype", long(random.below(3))));
  work.protocol = int(option("protocol", long(random.below(2))));
  work.algorithm = int(option("algorithm", 0));
  work.schedule = int(option("schedule", 0));
  work.integers = random.below(2);
  work.in_place = random.below(2);
  uint64_t limit = random.below(3) ? max_count : 40;
  work.count = 1 + random.below(limit);
  work.shift = random.below(3) == 0; // elements by which x and out are misaligned
  work.chunk = 1 + uint32_t(random.below(6));
  if (work.protocol == 2) work.chunk *= kLinePacks;
  if (option("epilogue", 0) && random.below(2)) {
    uint32_t rows = 1 + uint32_t(random.below(3));
    work.width = 1 + uint32_t(random.below(limit / rows));
    if (work.width > 8 && random.below(2)) work.width = work.width / 8 * 8;
    work.count = uint64_t(rows) * work.width;
  }
  return work;
}

void prepare(int me, int op, const Work& work) {
  Rank& rank = ranks[me];
  int bytes = dtype_bytes(work.dtype);
  size_t size = (work.count + 1) * bytes + 32;
  for (auto* buffer : {&rank.x, &rank.out, &rank.residual, &rank.summed, &rank.normed}) buffer->assign(size, char(0xff));
  auto aligned = [](std::vector<char>& buffer) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 15) & ~uintptr_t(15));
  };
  char* x = aligned(rank.x) + work.shift * bytes;
  char* out = work.in_place ? x : aligned(rank.out) + work.shift * bytes;
  for (uint64_t i = 0; i < work.count; ++i) write_value(work.dtype, x + i * bytes, work.input(op, me, i));
  uint32_t packs = uint32_t((work.count * bytes + kPackBytes - 1) / kPackBytes);
  rank.args = KernelArgs{};
  rank.args.x = x;
  rank.args.out = out;
  rank.args.count = work.count;
  rank.args.packs = packs;
  rank.args.chunk_packs = work.chunk;
  rank.args.aligned = work.shift == 0;
  if (work.width) {
    rank.args.rows = uint32_t(work.count / work.width);
    rank.args.width = work.width;
    rank.args.eps = 1e-5f;
    rank.args.residual = aligned(rank.residual);
    rank.args.summed = aligned(rank.summed);
    rank.args.normed = aligned(rank.normed);
    rank.weight.assign(work.width * 4 + 16, 0);
    rank.args.fp32_weight = op & 1;
    rank.args.weight = aligned(rank.weight);
    rank.args.rows_aligned = rank.args.aligned && work.width * bytes % kPackBytes == 0;
    int weight_dtype = rank.args.fp32_weight ? 0 : work.dtype;
    for (uint32_t i = 0; i < work.width; ++i) {
      write_value(weight_dtype, aligned(rank.weight) + i * dtype_bytes(weight_dtype), 1 + 0.25f * float(i % 3));
    }
    for (uint64_t i = 0; i < work.count; ++i) {
      write_value(work.dtype, aligned(rank.residual) + i * bytes, work.input(op, -1, i));
    }
  }
}

void check(int me, int op, const Work& work) {
  Rank& rank = ranks[me];
  std::vector<int32_t> members = members_of(work.group, me);
  int bytes = dtype_bytes(work.dtype);
  const char* out = static_cast<const char*>(rank.args.out);
  char where[160];
  std::snprintf(where, sizeof where,
                "operation %d on rank %d: %llu elements of dtype %d, protocol %d, algorithm %d, schedule %d", op, me,
                static_cast<unsigned long long>(work.count), work.dtype, work.protocol, work.algorithm, work.schedule);
  if (rank.status.reported) fail(std::string(where) + ": a wait timed out");
  uint64_t digest = 0;
  double step = work.dtype == 0 ? 6e-8 : work.dtype == 1 ? 5e-4 : 4e-3; // half an ulp at 1
  for (uint64_t i = 0; i < work.count; ++i) {
    float found = read_value(work.dtype, out + i * bytes);
    digest = mix(digest ^ as_bits(found));
    double sum = 0;
    for (int member : members) {
      char rounded[4] = {};
      write_value(work.dtype, rounded, work.input(op, member, i));
      sum += read_value(work.dtype, rounded);
    }
    double slack = work.integers ? 0 : step * 2 * double(members.size()) * std::sqrt(double(members.size()));
    if (!(std::fabs(found - sum) <= slack)) {
      fail(std::string(where) + ": element " + std::to_string(i) + " is " + std::to_string(found) + ", not " +
           std::to_string(sum));
    }
  }
  auto [first, fresh] = digests.emplace(std::pair(op, colors[work.group][me]), digest);
  if (!fresh && first->second != digest) fail(std::string(where) + ": not bitwise equal to another rank");
  if (!work.in_place) { // x is only read
    const char* x = static_cast<const char*>(rank.args.x);
    for (uint64_t i = 0; i < work.count; ++i) {
      char original[4] = {};
      write_value(work.dtype, original, work.input(op, me, i));
      if (std::memcmp(original, x + i * bytes, bytes)) fail(std::string(where) + ": x was modified");
    }
  }
  for (uint32_t row = 0; row < rank.args.rows; ++row) {
    double squares = 0;
    std::vector<double> kept(work.width);
    for (uint32_t i = 0; i < work.width; ++i) {
      uint64_t index = uint64_t(row) * work.width + i;
      char rounded[4] = {}, original[4] = {};
      write_value(work.dtype, original, work.input(op, -1, index));
      write_value(work.dtype, rounded, read_value(work.dtype, original) + read_value(work.dtype, out + index * bytes));
      kept[i] = read_value(work.dtype, rounded);
      squares += kept[i] * kept[i];
      if (std::memcmp(rounded, static_cast<const char*>(rank.args.summed) + index * bytes, bytes)) {
        fail(std::string(where) + ": residual sum");
      }
    }
    for (uint32_t i = 0; i < work.width; ++i) {
      double right = kept[i] / std::sqrt(squares / work.width + 1e-5) * (1 + 0.25 * (i % 3));
      const char* normed = static_cast<const char*>(rank.args.normed) + uint64_t(row) * work.width * bytes;
      double slack = 4 * step * (std::sqrt(double(work.width)) + std::fabs(right));
      if (!(std::fabs(read_value(work.dtype, normed + i * bytes) - right) <= slack)) {
        fail(std::string(where) + ": norm");
      }
    }
  }
  ++checked;
}

template <class Value, class Protocol>
void launch_nvrar(TwinTransport& transport, int schedule, const Group& group, const KernelArgs& args) {
  if (schedule == kDoubling) return all_reduce<Value, Protocol, kDoubling>(transport, group, args);
  if (schedule == kHalving) return all_reduce<Value, Protocol, kHalving>(transport, group, args);
  all_reduce<Value, Protocol, kOneShotInNode>(transport, group, args);
}

template <class Value>
void launch(TwinTransport& transport, const Work& work, const Member& member, const KernelArgs& args) {
#ifndef TWIN_SMALL
  if (work.algorithm == 1) return ring<Value>(transport, member.ring, args);
  if (work.algorithm == 2) return one_shot<Value>(transport, member.shot, args);
#endif
  if (work.protocol == 0) return launch_nvrar<Value, LLProtocol>(transport, work.schedule, member.group, args);
  if (work.protocol == 2) return launch_nvrar<Value, LineProtocol>(transport, work.schedule, member.group, args);
  launch_nvrar<Value, SignalProtocol>(transport, work.schedule, member.group, args);
}

// One thread of one block of a rank: runs all operations.
void run_thread(int me, int block, int thread) {
  Rank& rank = ranks[me];
  TwinTransport transport{me, thread, int(option("threads", 2)), block, int(rank.blocks.size()), &rank.blocks[block]};
  bool first = block == 0 && thread == 0;
  if (long rounds = option("tear", 0)) {
    const Group& group = rank.members[0].group;
    Operation<TwinTransport, Float32> op(transport, rank.args, group.state, group.status, group.timeout, group.id);
    if (block == 0) tear_test(op, group, 0, uint32_t(rounds), &torn_lines);
    return;
  }
  for (int op = 0; op < ops; ++op) {
    Work work = draw_work(op);
    if (first) prepare(me, op, work);
    rank.stream.wait();
    const Member& member = rank.members[work.group];
    if (work.dtype == 0) launch<Float32>(transport, work, member, rank.args);
#ifndef TWIN_SMALL // with it, only float32, which builds faster
    if (work.dtype == 1) launch<Float16>(transport, work, member, rank.args);
    if (work.dtype == 2) launch<Bfloat16>(transport, work, member, rank.args);
#endif
    rank.stream.wait();
    if (option("absent", -1) >= 0) return;
    if (first) check(me, op, work);
  }
}

void build() {
  std::vector<int> sizes;
  std::string list = arguments.count("nodes") ? arguments["nodes"] : "1";
  std::istringstream counts(list);
  for (std::string count; std::getline(counts, count, ',');) sizes.push_back(std::stoi(count));
  for (size_t node = 0; node < sizes.size(); ++node) node_of.insert(node_of.end(), sizes[node], int32_t(node));
  int size = int(node_of.size());
  ranks.resize(size);
  arenas.resize(size);
  colors.push_back(std::vector<int>(size, 0));
  if (option("groups", 1) > 1) { // a second set: ranks of equal parity
    colors.emplace_back();
    for (int rank = 0; rank < size; ++rank) colors.back().push_back(rank % 2);
  }
  std::vector<uint64_t> used(size, 0);
  for (auto& arena : arenas) arena.bytes.assign(size_t(option("arena", 16)) << 20, 0);
  for (size_t set = 0; set < colors.size(); ++set) {
    for (auto& rank : ranks) rank.members.emplace_back();
    std::vector<std::vector<uint64_t>> offsets(3, std::vector<uint64_t>(size));
    for (int me = 0; me < size; ++me) {
      Member& member = ranks[me].members[set];
      std::vector<int32_t> members = members_of(int(set), me), nodes;
      int group_rank = int(std::find(members.begin(), members.end(), me) - members.begin());
      for (int other : members) nodes.push_back(node_of[other]);
      uint64_t bytes = init_layout(member.group, nodes.data(), int(members.size()), group_rank, capacity, capacity);
      for (auto* flat : {&member.ring, &member.shot}) {
        flat->rank = group_rank;
        init_flat_layout(*flat, flat == &member.ring ? kRing : kOneShot, int(members.size()), capacity);
      }
      used[me] += 256 * (me + 1); // the offsets of a group differ between ranks
      uint64_t sizes[3] = {bytes, member.ring.bytes(), member.shot.bytes()};
      for (int i = 0; i < 3; ++i) {
        offsets[i][me] = used[me];
        used[me] += (sizes[i] + 255) / 256 * 256;
      }
      if (used[me] + 512 > arenas[me].bytes.size()) fail("the arena is too small");
    }
    for (int me = 0; me < size; ++me) {
      Member& member = ranks[me].members[set];
      std::vector<int32_t> members = members_of(int(set), me), nodes;
      std::vector<uint64_t> member_offsets;
      for (int other : members) {
        nodes.push_back(node_of[other]);
        member_offsets.push_back(offsets[0][other]);
      }
      int group_rank = member.ring.rank;
      char* base = arenas[me].base();
      init_inter_steps(member.group, nodes.data(), int(members.size()), group_rank, members.data(), member_offsets.data(),
                       base);
      auto local = by_node(nodes.data(), int(members.size()));
      for (auto& node : local) {
        if (std::find(node.begin(), node.end(), group_rank) == node.end()) continue;
        for (size_t i = 0; i < node.size(); ++i) {
          int other = members[node[i]];
          member.group.peer_memory[i] = arenas[other].base() + offsets[0][other];
          member.group.local_pe[i] = other;
        }
      }
      member.group.own_memory = base + offsets[0][me];
      member.group.id = int(set);
      member.group.state = &member.state;
      for (auto* flat : {&member.ring, &member.shot}) {
        auto& flat_offsets = offsets[flat == &member.ring ? 1 : 2];
        for (size_t i = 0; i < members.size(); ++i) {
          flat->pe[i] = members[i];
          flat->remote_memory[i] = base + flat_offsets[members[i]];
        }
        flat->own_memory = base + flat_offsets[me];
        flat->state = flat == &member.ring ? &member.ring_state : &member.shot_state;
      }
      long start = option("sequence", 0); // for example near the wrap-around of the 32-bit flags
      for (auto* state : {&member.state, &member.ring_state, &member.shot_state}) state->sequence = start;
      uint64_t timeout = uint64_t(option("timeout", 20000000));
      member.group.status = member.ring.status = member.shot.status = &ranks[me].status;
      member.group.timeout = member.ring.timeout = member.shot.timeout = timeout;
    }
  }
}

// The scheduler: picks random fibers, but stops some ranks for a while, so that the others get far ahead of them.
void run() {
  std::vector<std::unique_ptr<Fiber>> fibers;
  long threads = option("threads", 2), blocks = option("blocks", 2), absent = option("absent", -1);
  for (int me = 0; me < int(ranks.size()); ++me) {
    Rank& rank = ranks[me];
    rank.blocks.resize(blocks + (option("uneven_blocks", 0) ? me % 2 : 0));
    rank.stream.size = int(rank.blocks.size() * threads);
    for (int block = 0; block < int(rank.blocks.size()); ++block) {
      rank.blocks[block].barrier.size = int(threads);
      for (int thread = 0; thread < threads && me != absent; ++thread) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers.back();
        fiber.stack.resize(64 << 10);
        fiber.rank = me;
        fiber.body = [=] { run_thread(me, block, thread); };
      }
    }
  }
  rng.state = mix(seed);
  uint64_t stopped = 0, until = 0, speed = 1;
  while (!fibers.empty()) {
    if (++ticks >= until) {
      stopped = rng.below(2) ? rng.next() & rng.next() : 0; // bit mask of ranks
      until = ticks + rng.below(20000);
      speed = uint64_t(option("speed", long(rng.below(4)))); // of the network
    }
    uint64_t arrivals = speed == 0 ? rng.below(30) == 0 : speed == 1 ? rng.below(3) : rng.below(16);
    for (uint64_t i = 0; i < arrivals && !in_flight.empty(); ++i) deliver(rng.below(in_flight.size()));
    size_t pick = rng.below(fibers.size());
    if (stopped >> fibers[pick]->rank % 64 & 1) continue;
    resume(*fibers[pick]);
    if (fibers[pick]->finished) {
      std::swap(fibers[pick], fibers.back());
      fibers.pop_back();
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    arguments[argument.substr(0, argument.find('='))] = argument.substr(argument.find('=') + 1);
  }
  seed = option("seed", 1);
  ops = option("ops", 100);
  capacity = option("capacity", 4096);
  max_count = option("max_count", 600);
  torn_lines_are_counted = option("tear", 0) != 0;
  faults = {option("torn", 0) != 0, option("early", 0) != 0, option("replay", 0) != 0,
            option("whole", 0) != 0};
  build();
  run();
  if (option("absent", -1) >= 0) {
    for (auto& rank : ranks) {
      const Status& status = rank.status;
      std::printf("%u %u %u %u %d %llu\n", status.reported, status.group, status.phase, status.step, int(status.peer),
                  static_cast<unsigned long long>(status.sequence));
    }
    return 0;
  }
  if (option("tear", 0)) {
    std::printf("%u torn lines\n", torn_lines);
    return 0;
  }
  std::printf("%ld results, %llu scheduler steps\n", checked, static_cast<unsigned long long>(ticks));
}

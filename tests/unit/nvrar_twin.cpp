// Runs the kernels of csrc/nvrar without a GPU: every thread of every block of every rank is a fiber of one process,
// and a seeded scheduler decides who runs next and which eight bytes of what was put or stored arrive next. So a run is
// repeated exactly by its seed, and a run in which nobody can go on is noticed.
//
// nvrar_twin nodes=2,2 ops=200 seed=1 ...; prints what went wrong and returns 1, or prints how much it did.
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
long option(const char* name, long otherwise) {
  return arguments.count(name) ? std::stol(arguments[name]) : otherwise;
}

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

// ---- fibers

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  std::vector<char> stack;
  std::function<void()> body;
  int rank = 0;
  bool started = false, over = false;
};

jmp_buf scheduler;
Fiber* running = nullptr;
Random chance{0};

void enter() {
  running->body();
  running->over = true;
  _longjmp(scheduler, 1);
}

void yield() {
  if (_setjmp(running->at) == 0) _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
  running = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&fiber.context, enter, 0);
  setcontext(&fiber.context);
}

// ---- the network: eight bytes at a time, in any order

struct Item {
  char* to;
  const char* from; // read when it arrives, as a put that is under way may; or nothing, and `value` arrives
  uint64_t value;
  std::shared_ptr<int> part; // of what must all have arrived before its signal
  bool signal;
};
std::vector<Item> under_way;

void deliver(size_t index) {
  Item item = under_way[index];
  if (item.signal && *item.part > 0) return;
  under_way[index] = under_way.back();
  under_way.pop_back();
  if (item.from) std::memcpy(&item.value, item.from, 8);
  std::memcpy(item.to, &item.value, 8);
  if (!item.signal) --*item.part;
}

void post(Item item) {
  if (!item.signal) ++*item.part;
  under_way.push_back(item);
  if (chance.below(4) == 0) deliver(under_way.size() - 1);
}

// ---- a rank

struct Arena {
  std::vector<char> bytes;
  char* base() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.data()) + 255) & ~uintptr_t(255)); }
};

struct Barrier {
  int size = 0, waiting = 0;
  uint64_t turn = 0;
  void wait() {
    uint64_t mine = turn;
    if (++waiting == size) {
      waiting = 0;
      ++turn;
      return;
    }
    while (turn == mine) yield();
  }
};

struct Block {
  Barrier barrier;
  std::shared_ptr<int> stores = std::make_shared<int>(0); // to peers, still under way
  std::shared_ptr<int> putting;
  std::vector<float> parts;
};

std::vector<Arena> arenas;
uint64_t ticks = 0;

struct TwinWire {
  int rank_, thread_, threads_, block_, blocks_;
  Block* shared;

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  void sync() { shared->barrier.wait(); }

  bool own(const void* at) const {
    const char* byte = static_cast<const char*>(at);
    return byte >= arenas[rank_].base() && byte < arenas[rank_].base() + arenas[rank_].bytes.size() - 256;
  }
  void store8(char* to, uint64_t value) {
    if (own(to)) {
      std::memcpy(to, &value, 8);
    } else {
      post(Item{to, nullptr, value, shared->stores, false});
    }
  }
  Line load_line(const Line* from) {
    if (chance.below(16) == 0) yield();
    return *from;
  }
  void store_line(Line* to, Line line) {
    store8(reinterpret_cast<char*>(to), uint64_t(line.flag0) << 32 | line.data0);
    store8(reinterpret_cast<char*>(to) + 8, uint64_t(line.flag1) << 32 | line.data1);
    if (chance.below(8) == 0) yield();
  }
  Unit load_data(const Unit* from) { return *from; }
  void store_data(Unit* to, Unit unit) {
    store8(reinterpret_cast<char*>(to), uint64_t(unit.word[1]) << 32 | unit.word[0]);
    store8(reinterpret_cast<char*>(to) + 8, uint64_t(unit.word[3]) << 32 | unit.word[2]);
    if (chance.below(8) == 0) yield();
  }
  uint64_t load_signal(const uint64_t* from) { return *from; }
  void store_signal(uint64_t* to, uint64_t value) {
    post(Item{reinterpret_cast<char*>(to), nullptr, value, shared->stores, true});
  }
  // Each thread copies some of the bytes, without waiting for the others, as on the GPU.
  void copy(char* to, const char* from, uint64_t bytes, int rank, const std::shared_ptr<int>& part) {
    if (!own(to)) fail("a put to an address that is not symmetric");
    char* there = arenas[rank].base() + (to - arenas[rank_].base());
    for (uint64_t at = 8 * thread_; at < bytes; at += 8 * threads_) post(Item{there + at, from + at, 0, part, false});
    if (chance.below(2)) yield();
  }
  void put(char* to, const char* from, uint64_t bytes, int rank) {
    copy(to, from, bytes, rank, std::make_shared<int>(0));
  }
  void put_signal(char* to, const char* from, uint64_t bytes, uint64_t* signal, uint64_t value, int rank) {
    if (thread_ == 0) shared->putting = std::make_shared<int>(0);
    sync();
    copy(to, from, bytes, rank, shared->putting);
    sync();
    char* there = arenas[rank].base() + (reinterpret_cast<char*>(signal) - arenas[rank_].base());
    if (thread_ == 0) post(Item{there, nullptr, value, shared->putting, true});
  }
  void settle(uint64_t*, uint64_t) {} // a signal here arrives after its data
  uint32_t count(uint32_t* counter) { return (*counter)++; }
  void wake(uint32_t* generation) { ++*generation; }
  uint32_t generation(const uint32_t* at) { return *at; }
  float rsqrt(float value) { return 1 / std::sqrt(value); }
  float sum(float value) {
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
  bool stopped(const State* state, const Status* status) { return state->aborted || status->stop; }
  void report(State* state, Status* status, int group, uint64_t number, Site site) {
    if (state->aborted++) return;
    *status = Status{0, 1, uint32_t(group), uint32_t(site.phase), uint32_t(site.step), uint32_t(site.peer), number};
  }
};

// ---- the trial

struct Member {
  Group group{};
  FlatGroup ring{}, shot{};
  State state{}, ring_state{}, shot_state{};
};

// What all ranks do in one operation.
struct Work {
  int group, value, protocol, algorithm; // protocol 0: words, 1: signals; algorithm 0: nvrar, 1: ring, 2: one-shot
  bool whole, in_place;                  // whole: integers, whose sum is exact
  uint64_t count;
  uint32_t chunk, shift, width;
  float input(uint64_t seed, int rank, uint64_t i) const {
    uint64_t bits = mix(seed + mix(rank + 1000 * i));
    return whole ? float(int(bits % 9) - 4) : float(double(bits >> 11) / (1ull << 53) - 0.5);
  }
};

int value_bytes(int value) { return value == 0 ? 4 : 2; }
float read_value(int value, const char* at) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, value_bytes(value));
  return value == 0 ? Float32::widen(bits) : value == 1 ? Float16::widen(bits) : Bfloat16::widen(bits);
}
void write_value(int value, char* at, float number) {
  uint32_t bits = value == 0   ? Float32::narrow(number)
                  : value == 1 ? uint32_t(Float16::narrow(number))
                               : uint32_t(Bfloat16::narrow(number));
  std::memcpy(at, &bits, value_bytes(value));
}

struct Rank {
  std::deque<Member> members; // of each set of groups; they hold pointers to their states
  std::vector<Block> blocks;
  Barrier stream;
  Status status{};
  std::vector<char> x, out, residual, normed, weight;
  Call call{};
};

std::vector<Rank> ranks;
std::vector<std::vector<int>> colors; // for each set of groups, the group of each rank
std::vector<int32_t> node_of;
std::map<std::pair<int, int>, uint64_t> digests; // of (operation, group): what the first rank to finish it got
long checked = 0, capacity, most, ops, seed;

std::vector<int32_t> members_of(int set, int rank) {
  std::vector<int32_t> found;
  for (int other = 0; other < int(ranks.size()); ++other) {
    if (colors[set][other] == colors[set][rank]) found.push_back(other);
  }
  return found;
}

Work draw(int op) {
  Random random{mix(seed * 1000003 + op)};
  Work work{};
  work.group = int(random.below(colors.size()));
  work.value = int(option("value", long(random.below(3))));
  work.protocol = int(option("protocol", long(random.below(2))));
  work.algorithm = int(option("algorithm", 0));
  work.whole = random.below(2);
  work.in_place = random.below(2);
  uint64_t limit = random.below(3) ? most : 40;
  work.count = 1 + random.below(limit);
  work.shift = random.below(3) == 0; // elements by which x and out miss their alignment
  work.chunk = 1 + uint32_t(random.below(6));
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
  int bytes = value_bytes(work.value);
  size_t size = (work.count + 1) * bytes + 32;
  for (auto* buffer : {&rank.x, &rank.out, &rank.residual, &rank.normed}) buffer->assign(size, char(0xff));
  auto aligned = [](std::vector<char>& buffer) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 15) & ~uintptr_t(15));
  };
  char* x = aligned(rank.x) + work.shift * bytes;
  char* out = work.in_place ? x : aligned(rank.out) + work.shift * bytes;
  for (uint64_t i = 0; i < work.count; ++i) write_value(work.value, x + i * bytes, work.input(op, me, i));
  uint32_t units = uint32_t((work.count * bytes + kUnit - 1) / kUnit);
  rank.call = Call{};
  rank.call.x = x;
  rank.call.out = out;
  rank.call.count = work.count;
  rank.call.units = units;
  rank.call.chunk = work.chunk;
  rank.call.aligned = work.shift == 0;
  if (work.width) {
    rank.call.rows = uint32_t(work.count / work.width);
    rank.call.width = work.width;
    rank.call.eps = 1e-5f;
    rank.call.residual = aligned(rank.residual);
    rank.call.normed = aligned(rank.normed);
    rank.weight.assign(work.width * 4 + 16, 0);
    rank.call.wide_weight = op & 1;
    rank.call.weight = aligned(rank.weight);
    rank.call.packed = rank.call.aligned && work.width * bytes % kUnit == 0;
    int kind = rank.call.wide_weight ? 0 : work.value;
    for (uint32_t i = 0; i < work.width; ++i) {
      write_value(kind, aligned(rank.weight) + i * value_bytes(kind), 1 + 0.25f * float(i % 3));
    }
    for (uint64_t i = 0; i < work.count; ++i) {
      write_value(work.value, aligned(rank.residual) + i * bytes, work.input(op, -1, i));
    }
  }
}

void check(int me, int op, const Work& work) {
  Rank& rank = ranks[me];
  std::vector<int32_t> members = members_of(work.group, me);
  int bytes = value_bytes(work.value);
  const char* out = static_cast<const char*>(rank.call.out);
  char where[160];
  std::snprintf(where, sizeof where, "operation %d on rank %d: %llu elements of type %d, protocol %d, algorithm %d", op,
                me, static_cast<unsigned long long>(work.count), work.value, work.protocol, work.algorithm);
  if (rank.status.reported) fail(std::string(where) + ": a wait timed out");
  uint64_t digest = 0;
  double step = work.value == 0 ? 6e-8 : work.value == 1 ? 5e-4 : 4e-3; // half an ulp at 1
  for (uint64_t i = 0; i < work.count; ++i) {
    float found = read_value(work.value, out + i * bytes);
    digest = mix(digest ^ as_bits(found));
    double sum = 0;
    for (int member : members) {
      char rounded[4] = {};
      write_value(work.value, rounded, work.input(op, member, i));
      sum += read_value(work.value, rounded);
    }
    double slack = work.whole ? 0 : step * 2 * double(members.size()) * std::sqrt(double(members.size()));
    if (!(std::fabs(found - sum) <= slack)) {
      fail(std::string(where) + ": element " + std::to_string(i) + " is " + std::to_string(found) + ", not " +
           std::to_string(sum));
    }
  }
  auto [first, fresh] = digests.emplace(std::pair(op, colors[work.group][me]), digest);
  if (!fresh && first->second != digest) fail(std::string(where) + ": other bits than another rank");
  if (!work.in_place) { // x is only read
    const char* x = static_cast<const char*>(rank.call.x);
    for (uint64_t i = 0; i < work.count; ++i) {
      char given[4] = {};
      write_value(work.value, given, work.input(op, me, i));
      if (std::memcmp(given, x + i * bytes, bytes)) fail(std::string(where) + ": x has changed");
    }
  }
  for (uint32_t row = 0; row < rank.call.rows; ++row) {
    double squares = 0;
    std::vector<double> kept(work.width);
    for (uint32_t i = 0; i < work.width; ++i) {
      uint64_t at = uint64_t(row) * work.width + i;
      char rounded[4] = {}, given[4] = {};
      write_value(work.value, given, work.input(op, -1, at));
      write_value(work.value, rounded, read_value(work.value, given) + read_value(work.value, out + at * bytes));
      kept[i] = read_value(work.value, rounded);
      squares += kept[i] * kept[i];
      if (std::memcmp(rounded, static_cast<const char*>(rank.call.residual) + at * bytes, bytes)) {
        fail(std::string(where) + ": residual sum");
      }
    }
    for (uint32_t i = 0; i < work.width; ++i) {
      double right = kept[i] / std::sqrt(squares / work.width + 1e-5) * (1 + 0.25 * (i % 3));
      const char* normed = static_cast<const char*>(rank.call.normed) + uint64_t(row) * work.width * bytes;
      double slack = 4 * step * (std::sqrt(double(work.width)) + std::fabs(right));
      if (!(std::fabs(read_value(work.value, normed + i * bytes) - right) <= slack)) {
        fail(std::string(where) + ": norm");
      }
    }
  }
  ++checked;
}

template <class Value> void launch(TwinWire& wire, const Work& work, const Member& member, const Call& call) {
#ifndef TWIN_SMALL
  if (work.algorithm == 1) return ring<Value>(wire, member.ring, call);
  if (work.algorithm == 2) return one_shot<Value>(wire, member.shot, call);
#endif
  if (work.protocol == 0) return all_reduce<Value, Words>(wire, member.group, call);
  all_reduce<Value, Signals>(wire, member.group, call);
}

// One thread of one block of a rank: its part in one operation after another.
void live(int me, int block, int thread) {
  Rank& rank = ranks[me];
  TwinWire wire{me, thread, int(option("threads", 2)), block, int(rank.blocks.size()), &rank.blocks[block]};
  bool first = block == 0 && thread == 0;
  for (int op = 0; op < ops; ++op) {
    Work work = draw(op);
    if (first) prepare(me, op, work);
    rank.stream.wait();
    const Member& member = rank.members[work.group];
    if (work.value == 0) launch<Float32>(wire, work, member, rank.call);
#ifndef TWIN_SMALL // only float32, which builds faster
    if (work.value == 1) launch<Float16>(wire, work, member, rank.call);
    if (work.value == 2) launch<Bfloat16>(wire, work, member, rank.call);
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
  if (option("groups", 1) > 1) { // and every other rank
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
      int place = int(std::find(members.begin(), members.end(), me) - members.begin());
      for (int other : members) nodes.push_back(node_of[other]);
      uint64_t bytes = shape(member.group, nodes.data(), int(members.size()), place, capacity, capacity);
      for (auto* flat : {&member.ring, &member.shot}) {
        flat->rank = place;
        shape_flat(*flat, flat == &member.ring ? kRing : kOneShot, int(members.size()), capacity);
      }
      used[me] += 256 * (me + 1); // no two ranks have a group at the same place
      uint64_t sizes[3] = {bytes, member.ring.bytes(), member.shot.bytes()};
      for (int kind = 0; kind < 3; ++kind) {
        offsets[kind][me] = used[me];
        used[me] += (sizes[kind] + 255) / 256 * 256;
      }
      if (used[me] + 512 > arenas[me].bytes.size()) fail("the arena is too small");
    }
    for (int me = 0; me < size; ++me) {
      Member& member = ranks[me].members[set];
      std::vector<int32_t> members = members_of(int(set), me), nodes;
      std::vector<uint64_t> theirs;
      for (int other : members) {
        nodes.push_back(node_of[other]);
        theirs.push_back(offsets[0][other]);
      }
      int place = member.ring.rank;
      char* base = arenas[me].base();
      plan_moves(member.group, nodes.data(), int(members.size()), place, members.data(), theirs.data(), base);
      auto local = by_node(nodes.data(), int(members.size()));
      for (auto& node : local) {
        if (std::find(node.begin(), node.end(), place) == node.end()) continue;
        for (size_t i = 0; i < node.size(); ++i) {
          int other = members[node[i]];
          member.group.peer[i] = arenas[other].base() + offsets[0][other];
          member.group.rank_of[i] = other;
        }
      }
      member.group.self = base + offsets[0][me];
      member.group.id = int(set);
      member.group.state = &member.state;
      for (auto* flat : {&member.ring, &member.shot}) {
        auto& where = offsets[flat == &member.ring ? 1 : 2];
        for (size_t i = 0; i < members.size(); ++i) {
          flat->pe[i] = members[i];
          flat->remote[i] = base + where[members[i]];
        }
        flat->self = base + where[me];
        flat->state = flat == &member.ring ? &member.ring_state : &member.shot_state;
      }
      long start = option("number", 0); // near the end of what a word's flag can count, for one
      for (auto* state : {&member.state, &member.ring_state, &member.shot_state}) state->number = start;
      uint64_t patience = uint64_t(option("timeout", 20000000));
      member.group.status = member.ring.status = member.shot.status = &ranks[me].status;
      member.group.timeout = member.ring.timeout = member.shot.timeout = patience;
    }
  }
}

// Who runs: mostly anybody, sometimes everybody but some ranks, so that others get as far ahead of them as they can.
void run() {
  std::vector<std::unique_ptr<Fiber>> fibers;
  long threads = option("threads", 2), blocks = option("blocks", 2), absent = option("absent", -1);
  for (int me = 0; me < int(ranks.size()); ++me) {
    Rank& rank = ranks[me];
    rank.blocks.resize(blocks + (option("unlike", 0) ? me % 2 : 0)); // ranks need not have the same number
    rank.stream.size = int(rank.blocks.size() * threads);
    for (int block = 0; block < int(rank.blocks.size()); ++block) {
      rank.blocks[block].barrier.size = int(threads);
      for (int thread = 0; thread < threads && me != absent; ++thread) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers.back();
        fiber.stack.resize(64 << 10);
        fiber.rank = me;
        fiber.body = [=] { live(me, block, thread); };
      }
    }
  }
  chance.state = mix(seed);
  uint64_t slow = 0, until = 0, speed = 1;
  while (!fibers.empty()) {
    if (++ticks >= until) {
      slow = chance.below(2) ? chance.next() & chance.next() : 0; // some ranks stand still
      until = ticks + chance.below(20000);
      speed = uint64_t(option("speed", long(chance.below(4)))); // of the network
    }
    uint64_t arrivals = speed == 0 ? chance.below(30) == 0 : speed == 1 ? chance.below(3) : chance.below(16);
    for (uint64_t i = 0; i < arrivals && !under_way.empty(); ++i) deliver(chance.below(under_way.size()));
    size_t pick = chance.below(fibers.size());
    if (slow >> fibers[pick]->rank % 64 & 1) continue;
    resume(*fibers[pick]);
    if (fibers[pick]->over) {
      std::swap(fibers[pick], fibers.back());
      fibers.pop_back();
    }
  }
}

} // namespace

int main(int count, char** words) {
  for (int i = 1; i < count; ++i) {
    std::string word = words[i];
    arguments[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  seed = option("seed", 1);
  ops = option("ops", 100);
  capacity = option("capacity", 4096);
  most = option("most", 600);
  build();
  run();
  if (option("absent", -1) >= 0) {
    for (auto& rank : ranks) {
      const Status& status = rank.status;
      std::printf("%u %u %u %u %d %llu\n", status.reported, status.group, status.phase, status.step, int(status.peer),
                  static_cast<unsigned long long>(status.number));
    }
    return 0;
  }
  std::printf("%ld results, %llu turns\n", checked, static_cast<unsigned long long>(ticks));
}

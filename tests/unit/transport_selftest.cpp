// Runs csrc/test_transport without GPU and NVSHMEM: forked processes call it as NVSHMEM's proxy thread does, with heaps
// in their own memory. Usage: TESTNET_HOST_ONLY=1 transport_selftest PES ROUNDS. Prints how many messages were torn
// without a fence, and what was wrong; returns 1 if something was.
#include "plugin.cpp"

#include <sys/wait.h>

namespace {

struct Meeting { // a bootstrap between the processes
  std::atomic<int> arrived[2], turn, winners;
  char board[16][sizeof(MemHandle)];
};
Meeting* meeting;
int own_rank, ranks, turn = 0, failures = 0;

int meet() {
  int side = turn & 1;
  if (meeting->arrived[side].fetch_add(1) + 1 == ranks) {
    meeting->arrived[side] = 0;
    meeting->turn.store(++turn);
  } else {
    ++turn;
    while (meeting->turn.load() < turn) sched_yield();
  }
  return 0;
}
int gather(const void* send, void* receive, int bytes, Bootstrap*) {
  std::memcpy(meeting->board[own_rank], send, size_t(bytes));
  meet();
  for (int i = 0; i < ranks; ++i) {
    std::memcpy(static_cast<char*>(receive) + i * bytes, meeting->board[i], size_t(bytes));
  }
  return meet();
}
void check(bool good, const char* what) {
  if (good) return;
  ++failures;
  std::printf("rank %d: %s\n", own_rank, what);
}

constexpr size_t kHeapBytes = 4 << 20, kStage = 0, kReceive = 1 << 20, kFlags = 3 << 20, kMessage = 16384;
Transport* net;
char* heap;
std::vector<char*> heaps;
std::vector<MemHandle> handles;

volatile uint64_t* word(size_t at) { return reinterpret_cast<volatile uint64_t*>(heap + at); }

int transfer(int op, int pe, size_t there, size_t here, size_t bytes) {
  RmaSide remote{heaps[size_t(pe)] + there, there, &handles[size_t(pe)]};
  RmaSide local{heap + here, here, &handles[size_t(own_rank)]};
  return net->rma(net, pe, RmaVerb{op, 1, 0, nullptr}, &remote, &local, RmaBytes{bytes, 1, 1, 1}, 1);
}
int inline_put(int pe, size_t there, uint64_t value) {
  RmaSide remote{heaps[size_t(pe)] + there, there, &handles[size_t(pe)]}, local{&value, 0, nullptr};
  return net->rma(net, pe, RmaVerb{kP, 0, 0, nullptr}, &remote, &local, RmaBytes{1, 8, 1, 1}, 1);
}
int atomic(int pe, int op, size_t there, uint64_t value, int bytes = 8, uint64_t compare = 0, size_t back = 0) {
  AmoSide side{};
  side.remote = {heaps[size_t(pe)] + there, there, &handles[size_t(pe)]};
  side.value = value;
  side.compare = compare;
  side.return_address = heap + back;
  return net->amo(net, pe, nullptr, AmoVerb{op, 0, 0, 0}, &side, AmoBytes{0, bytes}, 1);
}
void fence_all() {
  for (int pe = 0; net->fence && pe < ranks; ++pe) check(!net->fence(net, pe, 1), "a fence failed");
}
void quiet_all() {
  for (int pe = 0; pe < ranks; ++pe) check(!net->quiet(net, pe, 1), "a quiet failed");
}
template <class Ready> bool wait_for(Ready ready) {
  for (uint64_t limit = now_ns() + 10000000000u; !ready();) {
    if (now_ns() > limit) return false;
    sched_yield();
  }
  return true;
}

// The LL protocol: words of data and flag, no fence, two alternating buffers.
void test_words(int rounds) {
  int partner = own_rank ^ 1;
  auto value = [](int rank, int round, size_t i) {
    return uint64_t(round) << 32 | uint32_t(rank * 7919 + round * 31 + int(i));
  };
  for (int round = 1; round <= rounds; ++round) {
    size_t side = size_t(round & 1) * kMessage;
    for (size_t i = 0; i < kMessage; i += 8) *word(kStage + side + i) = value(own_rank, round, i);
    check(!transfer(kPut, partner, kReceive + side, kStage + side, kMessage), "a put failed");
    for (size_t i = 0; i < kMessage; i += 8) {
      bool arrived = wait_for([&] { return *word(kReceive + side + i) >> 32 == uint64_t(round); });
      if (!arrived) return check(false, "a word did not arrive");
      if (*word(kReceive + side + i) != value(partner, round, i)) return check(false, "a word is wrong");
    }
  }
}

// Put-with-signal, as NVSHMEM's device code requests it: put, fence, atomic. Returns the messages that were torn.
int test_signals(int rounds, bool fenced, bool by_inline_put) {
  int partner = own_rank ^ 1, torn = 0;
  quiet_all();
  meet();
  *word(kFlags) = 0;
  std::memset(heap + kReceive, 0, 2 * kMessage);
  meet();
  for (int round = 1; round <= rounds; ++round) {
    size_t side = size_t(round & 1) * kMessage;
    for (size_t i = 0; i < kMessage; i += 8) *word(kStage + side + i) = uint64_t(round) * 1000003 + i;
    check(!transfer(kPut, partner, kReceive + side, kStage + side, kMessage), "a put failed");
    if (fenced) fence_all();
    int failed = by_inline_put ? inline_put(partner, kFlags, uint64_t(round))
                               : atomic(partner, kSignalSet, kFlags, uint64_t(round));
    check(!failed, "a signal failed");
    if (!wait_for([&] { return *word(kFlags) >= uint64_t(round); })) return check(false, "no signal"), torn;
    bool whole = true;
    for (size_t i = 0; i < kMessage; i += 8) {
      whole = whole && *word(kReceive + side + i) == uint64_t(round) * 1000003 + i;
    }
    torn += !whole;
    if (!fenced) { // neither data nor signals of two rounds may mix
      quiet_all();
      meet();
    }
  }
  return torn;
}

void test_atomics(int rounds) {
  size_t sum = kFlags + 64, ticket = kFlags + 128, small = kFlags + 192, back = kFlags + 256, swapped = kFlags + 320;
  quiet_all();
  meet();
  for (size_t at : {sum, ticket, small, back, swapped}) *word(at) = 0;
  meet();
  uint64_t last = 0;
  for (int round = 0; round < rounds; ++round) {
    check(!atomic(0, kSignalAdd, sum, uint64_t(own_rank) + 1), "an addition failed");
    check(!atomic(0, kAdd, small, 0xffffffff, 4), "an addition of 4 bytes failed"); // that is -1
    check(!atomic(0, kFetchAdd, ticket, 1, 8, 0, back), "a fetch_add failed");
    quiet_all();
    check(round == 0 || *word(back) > last, "a ticket was given twice");
    last = *word(back);
  }
  check(!atomic(0, kCompareSwap, swapped, uint64_t(own_rank) + 1, 8, 0, back), "a compare_swap failed");
  quiet_all();
  meeting->winners += *word(back) == 0;
  meet();
  check(meeting->winners == 1, "not exactly one compare_swap has won");
  if (own_rank == 0) {
    check(*word(sum) == uint64_t(rounds) * uint64_t(ranks * (ranks + 1) / 2), "the sum is wrong");
    check(*word(ticket) == uint64_t(rounds * ranks), "the number of tickets is wrong");
    check(*word(small) == uint32_t(-rounds * ranks), "the 4-byte sum or what is next to it is wrong");
  }
  meet();
}

// After a quiet the data has arrived, and the source may be reused.
void test_quiet(int rounds) {
  int partner = own_rank ^ 1;
  auto value = [](int rank, int round, size_t i) { return uint64_t(round) << 24 | uint64_t(rank + int(i)); };
  for (int round = 1; round <= rounds; ++round) {
    size_t bytes = (8 + (size_t(round) * 7919 * 8) % 100000) / 8 * 8;
    auto all_are = [&](size_t base, int rank) {
      bool good = true;
      for (size_t i = 0; i < bytes; i += 8) good = good && *word(base + i) == value(rank, round, i);
      return good;
    };
    for (size_t i = 0; i < bytes; i += 8) *word(kStage + i) = value(own_rank, round, i);
    meet();
    check(!transfer(kPut, partner, kReceive, kStage, bytes), "a put failed");
    quiet_all();
    std::memset(heap + kStage, 0xee, bytes);
    meet();
    check(all_are(kReceive, partner), "data is missing after a quiet");
    check(!transfer(kGet, partner, kReceive, kStage, bytes), "a get failed");
    quiet_all();
    check(all_are(kStage, own_rank), "a get returned other data");
    meet();
  }
}

int run(int rank, int rounds) {
  own_rank = rank;
  Bootstrap bootstrap{0, rank, ranks, rank, ranks, gather, nullptr, [](Bootstrap*) { return meet(); }};
  if (nvshmemt_init(&net, nullptr, kInterfaceVersion)) return 1;
  net->bootstrap = &bootstrap, net->pe = rank, net->size = ranks;
  if (net->connect_endpoints(net, nullptr, 0)) return 1;
  heap = static_cast<char*>(mmap(nullptr, kHeapBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  MemHandle handle;
  net->get_mem_handle(&handle, heap, kHeapBytes, net, false);
  heaps.resize(size_t(ranks));
  handles.resize(size_t(ranks));
  gather(&heap, heaps.data(), sizeof heap, &bootstrap);
  gather(&handle, handles.data(), sizeof handle, &bootstrap);
  test_words(rounds);
  check(test_signals(rounds, true, false) == 0, "a signal arrived before its data");
  test_atomics(rounds / 2);
  test_quiet(rounds / 2);
  int torn = test_signals(rounds, false, false) + test_signals(rounds, false, true);
  if (rank == 0) std::printf("torn without a fence: %d\n", torn);
  RmaSide outside{heaps[size_t(rank ^ 1)] + kHeapBytes, 0, &handles[size_t(rank ^ 1)]}, local{heap, 0, nullptr};
  check(net->rma(net, rank ^ 1, RmaVerb{kPut, 1, 0, nullptr}, &outside, &local, RmaBytes{8, 1, 1, 1}, 1),
        "a put to memory that is not registered was accepted");
  meet();
  net->release_mem_handle(&handle, net);
  net->finalize(net);
  return failures != 0;
}

} // namespace

int main(int count, char** arguments) {
  ranks = count > 1 ? std::atoi(arguments[1]) : 2;
  int rounds = count > 2 ? std::atoi(arguments[2]) : 100, bad = 0;
  int flags = MAP_SHARED | MAP_ANONYMOUS;
  meeting = static_cast<Meeting*>(mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, flags, -1, 0));
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() == 0) {
      alarm(100);
      int result = run(rank, rounds);
      std::fflush(stdout);
      _exit(result);
    }
  }
  for (int status; wait(&status) > 0;) bad += status != 0;
  return bad != 0;
}

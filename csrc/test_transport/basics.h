// Small parts of the test transport: settings, clock, messages, random numbers, copies of whole words.
#pragma once
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace test_transport {

inline int own_pe = -1;

// One clock for all processes of the machine, in nanoseconds.
inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

inline double setting(const char* name, double fallback) {
  const char* given = std::getenv(name);
  return given && *given ? std::atof(given) : fallback;
}
inline uint64_t microseconds(const char* name) { return uint64_t(setting(name, 0) * 1e3); }

__attribute__((format(printf, 1, 2))) inline void print(const char* format, ...) {
  char text[1024], line[1100];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  int length = snprintf(line, sizeof line, "test transport, PE %d: %s\n", own_pe, text);
  if (write(2, line, std::min<size_t>(size_t(length), sizeof line - 1)) < 0) return;
}

// Ends the process: without its threads, others would wait for it forever.
[[noreturn]] inline void fatal(const char* what, const char* why) {
  print("%s: %s", what, why);
  _exit(77);
}

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  uint64_t below(uint64_t limit) { return limit ? (next() >> 11) % limit : 0; }
};

// Waits a little longer with every idle round.
struct Backoff {
  uint64_t rounds = 0;
  void tick(bool busy) {
    if (busy) {
      rounds = 0;
    } else if (++rounds < 4000) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
};

// Copies 8 bytes at a time where the addresses allow it, so that no word is ever seen half written.
inline void copy_words(void* to, const void* from, size_t bytes) {
  char* t = static_cast<char*>(to);
  const char* f = static_cast<const char*>(from);
  uintptr_t addresses = reinterpret_cast<uintptr_t>(t) | reinterpret_cast<uintptr_t>(f);
  if (addresses % 8 == 0) {
    for (; bytes >= 8; bytes -= 8, t += 8, f += 8) {
      uint64_t word = __atomic_load_n(reinterpret_cast<const uint64_t*>(f), __ATOMIC_RELAXED);
      __atomic_store_n(reinterpret_cast<uint64_t*>(t), word, __ATOMIC_RELAXED);
    }
  }
  if (bytes == 4 && addresses % 4 == 0) {
    uint32_t word = __atomic_load_n(reinterpret_cast<const uint32_t*>(f), __ATOMIC_RELAXED);
    __atomic_store_n(reinterpret_cast<uint32_t*>(t), word, __ATOMIC_RELAXED);
    return;
  }
  std::memcpy(t, f, bytes);
}

} // namespace test_transport

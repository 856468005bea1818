// What operation.h asks of a machine, on a GPU: volatile and ordered loads and stores, and NVSHMEM's puts.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "operation.h"

namespace nvrar {

constexpr int kMaxThreads = 512;

struct GpuWire {
  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int threads() const { return blockDim.x; }
  __device__ __forceinline__ int block() const { return blockIdx.x; }
  __device__ __forceinline__ int blocks() const { return gridDim.x; }
  __device__ __forceinline__ void sync() { __syncthreads(); }

  // With -DNVRAR_JITTER, for tests: one thread of so many stands still for up to 16 us, where others might overtake it.
  __device__ __forceinline__ void linger(uint32_t one_of) {
#ifdef NVRAR_JITTER
    uint32_t draw = (uint32_t(clock64()) ^ (threadIdx.x << 16) ^ (blockIdx.x << 8)) * 2654435761u;
    draw ^= draw >> 15;
    if (draw % one_of) return;
    for (uint64_t until = now() + (draw >> 18); now() < until;) {
    }
#endif
  }

  __device__ __forceinline__ Line load_line(const Line* from) {
    Line line;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(line.data0), "=r"(line.flag0), "=r"(line.data1), "=r"(line.flag1)
                 : "l"(from)
                 : "memory");
    return line;
  }
  __device__ __forceinline__ void store_line(Line* to, Line line) {
    linger(8192);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(line.data0), "r"(line.flag0),
                 "r"(line.data1), "r"(line.flag1)
                 : "memory");
  }
  __device__ __forceinline__ Unit load_data(const Unit* from) {
    Unit unit;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(unit.word[0]), "=r"(unit.word[1]), "=r"(unit.word[2]), "=r"(unit.word[3])
                 : "l"(from)
                 : "memory");
    return unit;
  }
  __device__ __forceinline__ void store_data(Unit* to, Unit unit) {
    linger(8192);
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(unit.word[0]), "r"(unit.word[1]),
                 "r"(unit.word[2]), "r"(unit.word[3])
                 : "memory");
  }
  __device__ __forceinline__ uint64_t load_signal(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  // The barrier before it orders the other threads' stores; the fence makes them, too, seen by whoever sees the signal.
  __device__ __forceinline__ void store_signal(uint64_t* to, uint64_t value) {
    linger(8);
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }

  __device__ __forceinline__ void put(char* to, const char* from, uint64_t bytes, int rank) {
    linger(1024);
    nvshmemx_putmem_nbi_block(to, from, bytes, rank);
  }
  __device__ __forceinline__ void put_signal(char* to, const char* from, uint64_t bytes, uint64_t* signal,
                                             uint64_t value, int rank) {
    linger(1024);
    nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, rank);
  }

  // Some networks deliver a signal before the GPU sees the data it follows; NVSHMEM's test knows what to do there.
  __device__ __forceinline__ void settle(uint64_t* signal, uint64_t value) {
    nvshmem_uint64_test(signal, NVSHMEM_CMP_GE, value);
  }

  __device__ __forceinline__ uint32_t count(uint32_t* counter) {
    linger(8);
    __threadfence();
    uint32_t before = atomicAdd(counter, 1);
    __threadfence();
    return before;
  }
  __device__ __forceinline__ void wake(uint32_t* generation) {
    __threadfence();
    atomicAdd(generation, 1);
  }
  __device__ __forceinline__ uint32_t generation(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
  }

  __device__ __forceinline__ float rsqrt(float value) { return rsqrtf(value); }
  __device__ __forceinline__ float sum(float value) {
    __shared__ float parts[kMaxThreads / 32];
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) total += parts[warp];
    __syncthreads();
    return total;
  }

  __device__ __forceinline__ uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }
  __device__ __forceinline__ void pause() {}
  static __device__ __noinline__ bool stopped(State* state, const volatile Status* status) {
    if (*static_cast<volatile uint32_t*>(&state->aborted)) return true;
    if (!status->stop) return false;
    state->aborted = 1;
    return true;
  }
  static __device__ __noinline__ void report(State* state, volatile Status* status, int group, uint64_t number,
                                             Site site) {
    if (atomicExch(&state->aborted, 1) || status->reported) return; // another wait was first
    status->group = group;
    status->phase = site.phase;
    status->step = site.step;
    status->peer = site.peer;
    status->number = number;
    __threadfence_system();
    status->reported = 1;
  }
};

} // namespace nvrar

// The Transport of operation.h on a GPU: volatile, acquire and release memory operations, and NVSHMEM puts.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "operation.h"

namespace nvrar {

constexpr int kMaxThreads = 512;

struct GpuTransport {
  bool host_heap; // the symmetric heap is host memory (NVSHMEM_HEAP_KIND=SYSMEM)

  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int threads() const { return blockDim.x; }
  __device__ __forceinline__ int block() const { return blockIdx.x; }
  __device__ __forceinline__ int blocks() const { return gridDim.x; }
  __device__ __forceinline__ void sync() { __syncthreads(); }

  // With -DNVRAR_JITTER, for tests: one of `one_of` threads spins for up to 16 us, to provoke races.
  __device__ __forceinline__ void jitter(uint32_t one_of) {
#ifdef NVRAR_JITTER
    uint32_t draw = (uint32_t(clock64()) ^ (threadIdx.x << 16) ^ (blockIdx.x << 8)) * 2654435761u;
    draw ^= draw >> 15;
    if (draw % one_of) return;
    for (uint64_t until = now() + (draw >> 18); now() < until;) {
    }
#endif
  }

  __device__ __forceinline__ LLLine load_line(const LLLine* from) {
    LLLine line;
    asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];"
                 : "=l"(line.word[0]), "=l"(line.word[1])
                 : "l"(from)
                 : "memory");
    return line;
  }
  __device__ __forceinline__ void store_line(LLLine* to, LLLine line) {
    jitter(8192);
    asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(line.word[0]), "l"(line.word[1])
                 : "memory");
  }
  __device__ __forceinline__ Pack load_data(const Pack* from) {
    Pack pack;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(from)
                 : "memory");
    return pack;
  }
  __device__ __forceinline__ void store_data(Pack* to, Pack pack) {
    jitter(8192);
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(pack.word[0]), "r"(pack.word[1]),
                 "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
  }
  __device__ __forceinline__ void store_word(uint64_t* to, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }
  __device__ __forceinline__ uint64_t load_signal(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
  // The sync() before orders the stores of the block's other threads. The fence makes them visible before the signal.
  __device__ __forceinline__ void store_signal(uint64_t* to, uint64_t value) {
    jitter(8);
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }

  // NVSHMEM's proxied put makes the source visible to the GPU only. A NIC reads GPU memory through the GPU's L2 cache,
  // so that is enough, but a heap in host memory needs a fence of system scope before the request for the put.
  __device__ __forceinline__ void release_sources() {
    if (host_heap && threadIdx.x == 0) __threadfence_system();
  }
  __device__ __forceinline__ void put(char* to, const char* from, uint64_t bytes, int pe) {
    jitter(1024);
    nvshmemx_putmem_nbi_block(to, from, bytes, pe);
  }
  __device__ __forceinline__ void put_signal(char* to, const char* from, uint64_t bytes, uint64_t* signal,
                                             uint64_t value, int pe) {
    jitter(1024);
    nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe);
  }

  // On some networks a signal becomes visible to the GPU before the data it follows. nvshmem_test handles that.
  __device__ __forceinline__ void acquire_put(uint64_t* signal, uint64_t value) {
    nvshmem_uint64_test(signal, NVSHMEM_CMP_GE, value);
  }

  __device__ __forceinline__ uint32_t fetch_increment(uint32_t* counter) {
    jitter(8);
    __threadfence();
    uint32_t before = atomicAdd(counter, 1);
    __threadfence();
    return before;
  }
  __device__ __forceinline__ void advance_generation(uint32_t* generation) {
    __threadfence();
    atomicAdd(generation, 1);
  }
  __device__ __forceinline__ uint32_t load_generation(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
  }

  __device__ __forceinline__ float rsqrt(float value) { return rsqrtf(value); }
  __device__ __forceinline__ float block_sum(float value) {
    __shared__ float parts[kMaxThreads / 32];
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
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
  static __device__ __noinline__ bool should_stop(GroupState* state, const volatile Status* status) {
    if (*static_cast<volatile uint32_t*>(&state->aborted)) return true;
    if (!status->stop) return false;
    state->aborted = 1;
    return true;
  }
  static __device__ __noinline__ void report_timeout(GroupState* state, volatile Status* status, int group,
                                                     uint64_t sequence, WaitSite site) {
    if (atomicExch(&state->aborted, 1) || status->reported) return; // another wait was reported first
    status->group = group;
    status->phase = site.phase;
    status->step = site.step;
    status->peer = site.peer;
    status->sequence = sequence;
    __threadfence_system();
    status->reported = 1;
  }
};

} // namespace nvrar

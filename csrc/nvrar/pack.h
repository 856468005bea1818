// A pack: 16 bytes of elements. Elements are added in fp32 and rounded to nearest even.
#pragma once
#include "layout.h"
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <cstring>
#endif

namespace nvrar {

struct alignas(16) Pack {
  uint32_t word[4];
};

#if defined(__CUDACC__)
NVRAR_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
NVRAR_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }
NVRAR_DEVICE float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
NVRAR_DEVICE uint16_t float_to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
NVRAR_DEVICE uint16_t float_to_bfloat(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
#else
inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float half_to_float(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}
inline uint16_t float_to_half(float value) {
  _Float16 rounded = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline uint16_t float_to_bfloat(float value) {
  uint32_t bits = as_bits(value);
  return value != value ? 0x7fff : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#endif

struct Float32 {
  using Bits = uint32_t;
  static NVRAR_DEVICE float to_float(Bits bits) { return as_float(bits); }
  static NVRAR_DEVICE Bits from_float(float value) { return as_bits(value); }
};
struct Float16 {
  using Bits = uint16_t;
  static NVRAR_DEVICE float to_float(Bits bits) { return half_to_float(bits); }
  static NVRAR_DEVICE Bits from_float(float value) { return float_to_half(value); }
};
struct Bfloat16 {
  using Bits = uint16_t;
  static NVRAR_DEVICE float to_float(Bits bits) { return as_float(uint32_t(bits) << 16); }
  static NVRAR_DEVICE Bits from_float(float value) { return float_to_bfloat(value); }
};

template <class Value> constexpr int kPackElements = kPackBytes / sizeof(typename Value::Bits);

// The elements of a pack in fp32. Sums accumulate here and are rounded once, by round().
template <class Value> struct Accumulator {
  static constexpr int kPerWord = 4 / sizeof(typename Value::Bits);
  float element[kPackElements<Value>];

  Accumulator() = default;
  NVRAR_DEVICE explicit Accumulator(Pack pack) {
#pragma unroll
    for (int i = 0; i < kPackElements<Value>; ++i) {
      element[i] = Value::to_float(typename Value::Bits(pack.word[i / kPerWord] >> (i % kPerWord * 16)));
    }
  }
  NVRAR_DEVICE void add(Pack pack) {
    Accumulator other(pack);
#pragma unroll
    for (int i = 0; i < kPackElements<Value>; ++i) element[i] += other.element[i];
  }
  NVRAR_DEVICE Pack round() const {
    Pack pack = {};
#pragma unroll
    for (int i = 0; i < kPackElements<Value>; ++i) {
      pack.word[i / kPerWord] |= uint32_t(Value::from_float(element[i])) << (i % kPerWord * 16);
    }
    return pack;
  }
};

// Loads pack `index` of a tensor of `count` elements. Elements beyond its end are zero.
template <class Value> NVRAR_DEVICE Pack load_pack(const void* tensor, uint64_t count, bool aligned, uint32_t index) {
  using Bits = typename Value::Bits;
  constexpr int n = kPackElements<Value>;
  uint64_t first = uint64_t(index) * n;
  if (aligned && first + n <= count) return static_cast<const Pack*>(tensor)[index];
  const Bits* elements = static_cast<const Bits*>(tensor) + first;
  Pack pack = {};
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (first + i < count) pack.word[i * sizeof(Bits) / 4] |= uint32_t(elements[i]) << (i * sizeof(Bits) % 4 * 8);
  }
  return pack;
}

// Stores pack `index` of a tensor of `count` elements, without elements beyond its end.
template <class Value>
NVRAR_DEVICE void store_pack(void* tensor, uint64_t count, bool aligned, uint32_t index, Pack pack) {
  using Bits = typename Value::Bits;
  constexpr int n = kPackElements<Value>;
  uint64_t first = uint64_t(index) * n;
  if (aligned && first + n <= count) {
    static_cast<Pack*>(tensor)[index] = pack;
    return;
  }
  Bits* elements = static_cast<Bits*>(tensor) + first;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (first + i < count) elements[i] = Bits(pack.word[i * sizeof(Bits) / 4] >> (i * sizeof(Bits) % 4 * 8));
  }
}

} // namespace nvrar

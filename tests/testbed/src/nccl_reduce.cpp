#include "nccl_reduce.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace bed::nccl {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A floating point number of few bits. Rounds to nearest even. Infinite: it has infinities (else the largest
// exponent counts numbers, and only all ones is NaN). Saturates: what is too large becomes the largest number, as
// CUDA's fp8 conversions do.
template <class Bits, int EXPONENT, int MANTISSA, bool Infinite, bool Saturates>
class Small {
 public:
  Small() = default;
  explicit Small(float value) {
    uint32_t bits = bits_of(value);
    bits_ = static_cast<Bits>((bits >> 31) << (EXPONENT + MANTISSA) | magnitude(bits & 0x7fffffff));
  }
  explicit operator float() const {
    uint32_t sign = static_cast<uint32_t>(bits_ >> (EXPONENT + MANTISSA)) << 31, rest = bits_ & NOT_A_NUMBER;
    if (rest >= (Infinite ? INFINITE : NOT_A_NUMBER))
      return float_of(sign | (Infinite && rest == INFINITE ? 0x7f800000 : 0x7fc00000));
    if (rest >> MANTISSA) return float_of(sign | ((rest << (23 - MANTISSA)) + REBIAS));
    return float_of(sign | bits_of(static_cast<float>(rest) * SMALLEST));
  }

 private:
  static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
  static constexpr uint32_t REBIAS = static_cast<uint32_t>(127 - BIAS) << 23;
  static constexpr uint32_t NOT_A_NUMBER = (1u << (EXPONENT + MANTISSA)) - 1;
  static constexpr uint32_t INFINITE = ((1u << EXPONENT) - 1) << MANTISSA;
  static constexpr uint32_t LARGEST = (Infinite ? INFINITE : NOT_A_NUMBER) - 1;
  inline static const float SMALLEST = std::ldexp(1.0f, 1 - BIAS - MANTISSA);  // the smallest subnormal

  // From the bits of a float without its sign.
  static uint32_t magnitude(uint32_t bits) {
    if (bits > 0x7f800000) return NOT_A_NUMBER;
    constexpr uint32_t too_large = Saturates ? LARGEST : Infinite ? INFINITE : NOT_A_NUMBER;
    if (bits == 0x7f800000) return too_large;
    uint32_t result;
    if (bits < REBIAS + (1u << 23) && BIAS < 127) {
      result = static_cast<uint32_t>(std::nearbyint(float_of(bits) / SMALLEST));
    } else {
      // A mantissa that is rounded up to the next power of two carries into the exponent by itself.
      constexpr int dropped = 23 - MANTISSA;
      bits -= REBIAS;
      result = (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
    }
    return result > LARGEST ? too_large : result;
  }

  Bits bits_ = 0;
};
using Half = Small<uint16_t, 5, 10, true, false>;
using Brain = Small<uint16_t, 8, 7, true, false>;
using E4M3 = Small<uint8_t, 4, 3, false, true>;
using E5M2 = Small<uint8_t, 5, 2, true, true>;

// What to calculate with: small floats as float, small integers as themselves (they wrap around).
template <class T>
struct Wide {
  using type = T;
};
template <class Bits, int E, int M, bool I, bool S>
struct Wide<Small<Bits, E, M, I, S>> {
  using type = float;
};

template <class T>
void combine_as(T* into, const T* from, size_t count, Reduction reduction) {
  using W = typename Wide<T>::type;
  auto each = [&](auto&& operation) {
    for (size_t i = 0; i < count; i++)
      into[i] = static_cast<T>(operation(static_cast<W>(into[i]), static_cast<W>(from[i])));
  };
  switch (reduction) {
    case Reduction::prod:
      return each([](W a, W b) { return static_cast<W>(a * b); });
    case Reduction::max:
      return each([](W a, W b) { return a > b ? a : b; });
    case Reduction::min:
      return each([](W a, W b) { return a < b ? a : b; });
    default:
      return each([](W a, W b) { return static_cast<W>(a + b); });
  }
}

template <class T>
void scale_as(T* data, size_t count, const void* factor) {
  using W = typename Wide<T>::type;
  T element;
  memcpy(&element, factor, sizeof element);
  for (size_t i = 0; i < count; i++) data[i] = static_cast<T>(static_cast<W>(data[i]) * static_cast<W>(element));
}

template <class T>
void divide_as(T* data, size_t count, int divisor) {
  using W = typename Wide<T>::type;
  for (size_t i = 0; i < count; i++) data[i] = static_cast<T>(static_cast<W>(data[i]) / static_cast<W>(divisor));
}

// Calls `work` with a null pointer of the type.
template <class Work>
void with_type(Dtype dtype, Work&& work) {
  switch (dtype) {
    case Dtype::int8:
      return work(static_cast<int8_t*>(nullptr));
    case Dtype::uint8:
      return work(static_cast<uint8_t*>(nullptr));
    case Dtype::int32:
      return work(static_cast<int32_t*>(nullptr));
    case Dtype::uint32:
      return work(static_cast<uint32_t*>(nullptr));
    case Dtype::int64:
      return work(static_cast<int64_t*>(nullptr));
    case Dtype::uint64:
      return work(static_cast<uint64_t*>(nullptr));
    case Dtype::float16:
      return work(static_cast<Half*>(nullptr));
    case Dtype::float32:
      return work(static_cast<float*>(nullptr));
    case Dtype::float64:
      return work(static_cast<double*>(nullptr));
    case Dtype::bfloat16:
      return work(static_cast<Brain*>(nullptr));
    case Dtype::float8e4m3:
      return work(static_cast<E4M3*>(nullptr));
    case Dtype::float8e5m2:
      return work(static_cast<E5M2*>(nullptr));
  }
}

}  // namespace

size_t size_of(Dtype dtype) {
  size_t size = 0;
  with_type(dtype, [&](auto* type) { size = sizeof *type; });
  return size;
}

void combine(char* into, const char* from, size_t count, Dtype dtype, Reduction reduction) {
  with_type(dtype, [&](auto* type) {
    using T = decltype(type);
    combine_as(reinterpret_cast<T>(into), reinterpret_cast<const std::remove_pointer_t<T>*>(from), count, reduction);
  });
}

void scale(char* data, size_t count, Dtype dtype, const void* factor) {
  with_type(dtype, [&](auto* type) { scale_as(reinterpret_cast<decltype(type)>(data), count, factor); });
}

void divide(char* data, size_t count, Dtype dtype, int divisor) {
  with_type(dtype, [&](auto* type) { divide_as(reinterpret_cast<decltype(type)>(data), count, divisor); });
}

}  // namespace bed::nccl

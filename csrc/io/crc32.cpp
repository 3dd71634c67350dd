#include "io/crc32.h"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeflow {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // x^32 + x^26 + x^23 + ..., its bits the other way round

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ kPolynomial : rest >> 1;
    table[byte] = rest;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

uint32_t by_table(uint32_t state, const uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) state = kTable[(state ^ bytes[i]) & 255] ^ state >> 8;
  return state;
}

#if defined(__x86_64__)
constexpr int64_t kStep = 64;  // bytes that are folded at once

// One 128-bit part moved on by the distance that `by` stands for.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i part, __m128i by, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(part, by, 0x00), high = _mm_clmulepi64_si128(part, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

// Products without carry fold the message onto itself until 16 bytes are left, which are reduced after Barrett (Gopal,
// Ozturk et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009; constants: section 7.
// `count` is a multiple of 16 and at least `kStep`.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(uint32_t state, const uint8_t* bytes, int64_t count) {
  const auto load = [](const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  const __m128i by_64_bytes = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16_bytes = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i parts[4] = {load(bytes), load(bytes + 16), load(bytes + 32), load(bytes + 48)};
  parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  int64_t at = kStep;
  for (; at + kStep <= count; at += kStep) {
    for (int i = 0; i < 4; ++i) parts[i] = fold(parts[i], by_64_bytes, load(bytes + at + 16 * i));
  }
  __m128i rest = parts[0];
  for (int i = 1; i < 4; ++i) rest = fold(rest, by_16_bytes, parts[i]);
  for (; at < count; at += 16) rest = fold(rest, by_16_bytes, load(bytes + at));

  const __m128i low_32 = _mm_setr_epi32(-1, 0, -1, 0);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 8), _mm_clmulepi64_si128(rest, by_16_bytes, 0x10));
  const __m128i to_64_bits = _mm_set_epi64x(0, 0x0163cd6124);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 4),
                       _mm_clmulepi64_si128(_mm_and_si128(rest, low_32), to_64_bits, 0x00));
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(rest, low_32), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_32), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(rest, quotient), 1));
}
#endif

}  // namespace

uint32_t crc32(const uint8_t* bytes, int64_t count) {
  uint32_t state = ~uint32_t{0};
  int64_t done = 0;
#if defined(__x86_64__)
  if (count >= kStep && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    done = count / 16 * 16;
    state = by_products(state, bytes, done);
  }
#endif
  return ~by_table(state, bytes + done, count - done);
}

}  // namespace moeflow

// How keys and values of past tokens lie in memory: one layer's cache, in blocks of `block_size` tokens.
//
// A block holds a cell for each KV head, which is contiguous (D: head_dim, S: block_size):
//
//   K  [D][S]    transposed: neighbouring positions lie side by side, so that they become the lanes of a score
//   V  [S][D]    neighbouring dimensions become the lanes of a result
//   and for INT8 behind them float scales of K [S] and of V [S]: one a token, value = q * scale
//
// Or, where values are the first L dimensions of keys (L: latent_dim), both as one row a token:
//
//   K  [S][D]
//   and for INT8 behind them float scales of the first L dimensions [S] and of the rest [S]
//
// Values are F32, BF16 or INT8. With S a multiple of 16 and D of 2 every cell is aligned to 64 bytes, its V to 32.
// Included by the instruction sets' units: nothing here may have external linkage.
#pragma once

#include <cstdint>

#include "formats/convert.h"
#include "formats/matrix.h"

namespace moeflow {

struct KVCache {
  Format format;
  uint8_t* data;  // 64-byte aligned
  int64_t num_blocks, num_heads, block_size, head_dim;
  int64_t latent_dim = 0;  // 0: K and V are stored by themselves, of head_dim each

  int64_t value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

static inline int64_t kv_value_bytes(Format format) {
  return format == Format::kF32 ? 4 : format == Format::kBF16 ? 2 : 1;
}

// Bytes of K alone in a cell, and, where it is stored by itself, of V.
static inline int64_t kv_half_bytes(const KVCache& cache) {
  return cache.block_size * cache.head_dim * kv_value_bytes(cache.format);
}

// Bytes from the beginning of a cell to its V, and to its scales.
static inline int64_t kv_values_offset(const KVCache& cache) {
  return cache.latent_dim > 0 ? 0 : kv_half_bytes(cache);
}
static inline int64_t kv_scales_offset(const KVCache& cache) {
  return (cache.latent_dim > 0 ? 1 : 2) * kv_half_bytes(cache);
}

static inline int64_t kv_cell_bytes(const KVCache& cache) {
  const int64_t scales = cache.format == Format::kINT8 ? 2 * cache.block_size * static_cast<int64_t>(sizeof(float)) : 0;
  return kv_scales_offset(cache) + scales;
}

static inline uint8_t* kv_cell(const KVCache& cache, int64_t block, int64_t head) {
  return cache.data + (block * cache.num_heads + head) * kv_cell_bytes(cache);
}

// Store `count` floats, `stride` values apart, as int8; returns the scale, which is not finite if one of them is not.
static inline float kv_quantize(const float* x, int64_t count, int8_t* out, int64_t stride) {
  int32_t largest_bits = 0;  // without their sign, floats are ordered as their bits are, infinity and NaN above all
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = bit_cast<int32_t>(x[i]) & 0x7fffffff;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  const float largest = bit_cast<float>(largest_bits);
  if (!(largest > 1e-30f && largest_bits < 0x7f800000)) {
    for (int64_t i = 0; i < count; ++i) out[i * stride] = 0;
    return largest / 127.0f;
  }
  const float inverse = 127.0f / largest;
  for (int64_t i = 0; i < count; ++i) out[i * stride] = static_cast<int8_t>(to_nearest(x[i] * inverse));
  return largest / 127.0f;
}

// Store one token's row of one head where values are the first dimensions of keys.
static inline void write_latent_row(const KVCache& cache, int64_t slot, int64_t head, const float* k) {
  const int64_t offset = slot % cache.block_size, dim = cache.head_dim, latent = cache.latent_dim;
  uint8_t* const cell = kv_cell(cache, slot / cache.block_size, head);
  uint8_t* const row = cell + offset * dim * kv_value_bytes(cache.format);
  switch (cache.format) {
    case Format::kF32: __builtin_memcpy(row, k, dim * sizeof(float)); break;
    case Format::kBF16:
      for (int64_t d = 0; d < dim; ++d) reinterpret_cast<uint16_t*>(row)[d] = float_to_bf16(k[d]);
      break;
    default: {
      float* const scales = reinterpret_cast<float*>(cell + kv_scales_offset(cache));
      int8_t* const to = reinterpret_cast<int8_t*>(row);
      scales[offset] = kv_quantize(k, latent, to, 1);
      scales[cache.block_size + offset] = kv_quantize(k + latent, dim - latent, to + latent, 1);
    }
  }
}

// Store one token's K and V of one head, head_dim floats each, at slot = block * block_size + offset. Where values are
// the first dimensions of keys, v is not looked at.
static inline void write_kv_row(const KVCache& cache, int64_t slot, int64_t head, const float* k, const float* v) {
  if (cache.latent_dim > 0) return write_latent_row(cache, slot, head, k);
  const int64_t offset = slot % cache.block_size, dim = cache.head_dim, stride = cache.block_size;
  uint8_t* const cell = kv_cell(cache, slot / cache.block_size, head);
  uint8_t* const values = cell + kv_half_bytes(cache);
  switch (cache.format) {
    case Format::kF32: {
      float* const to = reinterpret_cast<float*>(cell) + offset;
      for (int64_t d = 0; d < dim; ++d) to[d * stride] = k[d];
      __builtin_memcpy(reinterpret_cast<float*>(values) + offset * dim, v, dim * sizeof(float));
      break;
    }
    case Format::kBF16: {
      uint16_t* const to = reinterpret_cast<uint16_t*>(cell) + offset;
      uint16_t* const v_to = reinterpret_cast<uint16_t*>(values) + offset * dim;
      for (int64_t d = 0; d < dim; ++d) to[d * stride] = float_to_bf16(k[d]);
      for (int64_t d = 0; d < dim; ++d) v_to[d] = float_to_bf16(v[d]);
      break;
    }
    default: {
      float* const scales = reinterpret_cast<float*>(values + kv_half_bytes(cache));
      scales[offset] = kv_quantize(k, dim, reinterpret_cast<int8_t*>(cell) + offset, stride);
      scales[stride + offset] = kv_quantize(v, dim, reinterpret_cast<int8_t*>(values) + offset * dim, 1);
    }
  }
}

template <typename T>
static inline void move_kv_values(const KVCache& cache, uint8_t* from_cell, int64_t from, uint8_t* to_cell, int64_t to) {
  const int64_t dim = cache.head_dim, stride = cache.block_size;
  T* const k_from = reinterpret_cast<T*>(from_cell);
  T* const k_to = reinterpret_cast<T*>(to_cell);
  if (cache.latent_dim > 0) {
    __builtin_memcpy(k_to + to * dim, k_from + from * dim, dim * sizeof(T));
    return;
  }
  for (int64_t d = 0; d < dim; ++d) k_to[d * stride + to] = k_from[d * stride + from];
  __builtin_memcpy(k_to + (stride + to) * dim, k_from + (stride + from) * dim, dim * sizeof(T));
}

// Copy one token's K and V of one head to another slot.
static inline void move_kv_row(const KVCache& cache, int64_t from_slot, int64_t to_slot, int64_t head) {
  uint8_t* const from_cell = kv_cell(cache, from_slot / cache.block_size, head);
  uint8_t* const to_cell = kv_cell(cache, to_slot / cache.block_size, head);
  const int64_t from = from_slot % cache.block_size, to = to_slot % cache.block_size;
  switch (cache.format) {
    case Format::kF32: return move_kv_values<float>(cache, from_cell, from, to_cell, to);
    case Format::kBF16: return move_kv_values<uint16_t>(cache, from_cell, from, to_cell, to);
    default: {
      move_kv_values<int8_t>(cache, from_cell, from, to_cell, to);
      const float* const scales = reinterpret_cast<const float*>(from_cell + kv_scales_offset(cache));
      float* const to_scales = reinterpret_cast<float*>(to_cell + kv_scales_offset(cache));
      to_scales[to] = scales[from];
      to_scales[cache.block_size + to] = scales[cache.block_size + from];
    }
  }
}

}  // namespace moeflow

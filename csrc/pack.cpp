// From row-major weights to bands and back. Spread over the pool by bands; each band is written by one thread.
#include <cmath>
#include <cstring>

#include "ops.h"
#include "pool.h"

namespace moeflow {
namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &subnormal, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Nearest, ties to even. Scales are finite and never negative here except Q4_0's, whose sign counts.
uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits - (112u << 23)) >> 13);
}

float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float read(SourceType type, const void* source, int64_t index) {
  switch (type) {
    case SourceType::kF32: return static_cast<const float*>(source)[index];
    case SourceType::kBF16: return bf16_to_float(static_cast<const uint16_t*>(source)[index]);
    case SourceType::kF16: return half_to_float(static_cast<const uint16_t*>(source)[index]);
  }
  return 0;
}

// A group of one output as integers and their scale.
struct Group {
  uint16_t scale;
  int8_t q[kGroup];  // INT4: -8..7
};

Group quantize(Format format, const float* w) {
  Group group{};
  float largest = 0;  // with its sign: Q4_0 maps it to -8, so that the wider half of the range is used
  for (int i = 0; i < kGroup; ++i) {
    if (std::fabs(w[i]) > std::fabs(largest)) largest = w[i];
  }
  const float scale = format == Format::kINT8 ? std::fabs(largest) / 127.0f : largest / -8.0f;
  group.scale = float_to_half(scale);
  const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const int low = format == Format::kINT8 ? -127 : -8, high = format == Format::kINT8 ? 127 : 7;
    const int q = static_cast<int>(std::lround(w[i] * inverse));
    group.q[i] = static_cast<int8_t>(q < low ? low : q > high ? high : q);
  }
  return group;
}

void write_group(Format format, const Group& group, int64_t g, int lane, int64_t cols, uint8_t* band) {
  reinterpret_cast<uint16_t*>(band)[g * kBand + lane] = group.scale;
  uint8_t* data = band + scale_bytes(format, cols);
  if (format == Format::kINT8) {
    for (int v = 0; v < 8; ++v) std::memcpy(data + (g * 8 + v) * 64 + lane * 4, group.q + v * 4, 4);
    return;
  }
  for (int v = 0; v < 4; ++v) {
    for (int j = 0; j < 4; ++j) {
      const int low = group.q[v * 8 + j] + 8, high = group.q[v * 8 + 4 + j] + 8;
      data[(g * 4 + v) * 64 + lane * 4 + j] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

Group read_group(Format format, int64_t g, int lane, int64_t cols, const uint8_t* band) {
  Group group;
  group.scale = reinterpret_cast<const uint16_t*>(band)[g * kBand + lane];
  const uint8_t* data = band + scale_bytes(format, cols);
  if (format == Format::kINT8) {
    for (int v = 0; v < 8; ++v) std::memcpy(group.q + v * 4, data + (g * 8 + v) * 64 + lane * 4, 4);
    return group;
  }
  for (int v = 0; v < 4; ++v) {
    for (int j = 0; j < 4; ++j) {
      const uint8_t byte = data[(g * 4 + v) * 64 + lane * 4 + j];
      group.q[v * 8 + j] = static_cast<int8_t>((byte & 15) - 8);
      group.q[v * 8 + 4 + j] = static_cast<int8_t>((byte >> 4) - 8);
    }
  }
  return group;
}

struct PackJob {
  Format format;
  SourceType type;
  const void* source;  // values, or blocks
  bool is_blocks;
  int64_t cols;
  const int64_t* order;
  int64_t num_rows;
  uint8_t* out;
};

Group read_block(Format format, const uint8_t* block) {
  Group group{};
  std::memcpy(&group.scale, block, 2);
  if (format == Format::kINT8) {
    std::memcpy(group.q, block + 2, kGroup);
  } else {  // Q4_0: byte j holds values j and j + 16
    for (int j = 0; j < 16; ++j) {
      group.q[j] = static_cast<int8_t>((block[2 + j] & 15) - 8);
      group.q[j + 16] = static_cast<int8_t>((block[2 + j] >> 4) - 8);
    }
  }
  return group;
}

void pack_lane(const PackJob& job, int64_t source_row, int lane, uint8_t* band) {
  const int64_t k = padded_cols(job.cols), begin = source_row * job.cols;
  if (job.format == Format::kINT8 || job.format == Format::kINT4) {
    const int64_t block_bytes = job.format == Format::kINT8 ? 34 : 18;
    for (int64_t g = 0; g < k / kGroup; ++g) {
      Group group{};
      if (source_row >= 0 && job.is_blocks) {
        const int64_t block = source_row * (job.cols / kGroup) + g;
        group = read_block(job.format, static_cast<const uint8_t*>(job.source) + block * block_bytes);
      } else if (source_row >= 0) {
        float w[kGroup];
        for (int i = 0; i < kGroup; ++i) {
          const int64_t col = g * kGroup + i;
          w[i] = col < job.cols ? read(job.type, job.source, begin + col) : 0.0f;
        }
        group = quantize(job.format, w);
      }
      write_group(job.format, group, g, lane, job.cols, band);
    }
    return;
  }
  const bool is_copy = job.format == Format::kBF16 && job.type == SourceType::kBF16;
  for (int64_t col = 0; col < k; ++col) {
    const bool exists = source_row >= 0 && col < job.cols;
    if (job.format == Format::kF32) {
      reinterpret_cast<float*>(band)[col * kBand + lane] = exists ? read(job.type, job.source, begin + col) : 0.0f;
    } else {
      uint16_t value = 0;
      if (exists && is_copy) value = static_cast<const uint16_t*>(job.source)[begin + col];
      if (exists && !is_copy) value = float_to_bf16(read(job.type, job.source, begin + col));
      reinterpret_cast<uint16_t*>(band)[(col / 2) * 2 * kBand + lane * 2 + col % 2] = value;
    }
  }
}

void run_pack(void* context, Team& team, int) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  for (int64_t index; (index = team.counter(0).take()) < num_bands(job.num_rows);) {
    uint8_t* band = job.out + index * band_bytes(job.format, job.cols);
    std::memset(band, 0, scale_bytes(job.format, job.cols));
    for (int lane = 0; lane < kBand; ++lane) {
      const int64_t row = index * kBand + lane;
      pack_lane(job, row >= job.num_rows ? -1 : job.order != nullptr ? job.order[row] : row, lane, band);
    }
  }
}

struct UnpackJob {
  const Matrix& matrix;
  float* out;
};

float value_at(const Matrix& m, const uint8_t* band, int64_t col, int lane) {
  if (m.format == Format::kF32) return reinterpret_cast<const float*>(band)[col * kBand + lane];
  return bf16_to_float(reinterpret_cast<const uint16_t*>(band)[(col / 2) * 2 * kBand + lane * 2 + col % 2]);
}

void unpack_lane(const Matrix& m, const uint8_t* band, int lane, float* out) {
  if (m.format == Format::kF32 || m.format == Format::kBF16) {
    for (int64_t col = 0; col < m.cols; ++col) out[col] = value_at(m, band, col, lane);
    return;
  }
  for (int64_t g = 0; g < padded_cols(m.cols) / kGroup; ++g) {
    const Group group = read_group(m.format, g, lane, m.cols, band);
    for (int i = 0; i < kGroup && g * kGroup + i < m.cols; ++i) {
      out[g * kGroup + i] = half_to_float(group.scale) * static_cast<float>(group.q[i]);
    }
  }
}

void run_unpack(void* context, Team& team, int) {
  const UnpackJob& job = *static_cast<const UnpackJob*>(context);
  for (int64_t row; (row = team.counter(0).take()) < job.matrix.rows;) {
    unpack_lane(job.matrix, job.matrix.band(row / kBand), static_cast<int>(row % kBand), job.out + row * job.matrix.cols);
  }
}

}  // namespace

void pack(Format format, SourceType type, const void* source, int64_t cols, const int64_t* order, int64_t num_rows,
          uint8_t* out) {
  PackJob job{format, type, source, false, cols, order, num_rows, out};
  run_on_pool(run_pack, &job);
}

void pack_blocks(Format format, const uint8_t* blocks, int64_t cols, const int64_t* order, int64_t num_rows,
                 uint8_t* out) {
  PackJob job{format, SourceType::kF32, blocks, true, cols, order, num_rows, out};
  run_on_pool(run_pack, &job);
}

void unpack(const Matrix& matrix, float* out) {
  UnpackJob job{matrix, out};
  run_on_pool(run_unpack, &job);
}

}  // namespace moeflow

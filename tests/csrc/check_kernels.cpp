// Checks every operation of the CPU extension against plain loops in double. Covers every format, several numbers of
// threads and every instruction set of this processor. Needs no Python, so that sanitizers see all of it. Memory has
// exactly the size passed to the operations, so sanitizers catch any access out of bounds. scripts/sanitize builds it.
//
// tests/kernels holds the same operations to tight bounds; here results only have to be right.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../csrc/ops/ops.h"
#include "../../csrc/threads/pool.h"

#if defined(__SANITIZE_THREAD__)
constexpr bool kMayFork = false;  // the thread sanitizer does not follow threads that are started after a fork
#else
constexpr bool kMayFork = true;
#endif

using namespace moeflow;

namespace {

using Floats = std::vector<float>;

std::mt19937 generator(1);

Floats drawn_floats(int64_t count) {
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Normally distributed. The numbers repeat after a prime count, which is no multiple of any row's length. An emulator
// takes longer to draw numbers than to check most results.
Floats random_floats(int64_t count, float scale = 1) {
  static const Floats drawn = drawn_floats(65537);
  static size_t next = 0;
  Floats values(count);
  for (float& value : values) {
    value = drawn[next] * scale;
    next = next + 1 == drawn.size() ? 0 : next + 1;
  }
  return values;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "check_kernels: %s\n", what.c_str());
  std::exit(1);
}

void expect(bool is_right, const std::string& what) {
  if (!is_right) fail(what + " is wrong");
}

// Errors are relative to the expected result or, if that is a sum whose terms may cancel out, to these: `squares`,
// added up.
void expect_close(const float* got, const std::vector<double>& want, double tolerance, const std::string& what,
                  double squares = 0) {
  double off = 0, size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    off += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  const double relative = std::sqrt(off / std::max(size, squares));
  if (!(relative <= tolerance)) fail(what + " is off by " + std::to_string(relative));
}

const char* name_of(Format format) {
  return with_format(format, [](auto it) { return it.kName; });
}

// The formats that floats are converted to.
std::vector<Format> made_formats() {
  std::vector<Format> formats;
#define MOEFLOW_ROW(NAME) \
  if (!holds_blocks(NAME::kTile)) formats.push_back(Format::k##NAME);
  MOEFLOW_FORMATS(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  return formats;
}
const std::vector<Format> kFormats = made_formats();

// The others, which are made of files' blocks, and where in a block of theirs fp16 numbers lie.
struct BlockKind {
  Format format;
  SourceType type;
  std::vector<int> halves;
};
const std::vector<BlockKind> kBlockKinds = {
    {Format::kQ5_0, SourceType::kQ5_0, {0}},           {Format::kQ5_1, SourceType::kQ5_1, {0, 2}},
    {Format::kQ2_K, SourceType::kQ2_K, {80, 82}},      {Format::kQ3_K, SourceType::kQ3_K, {108}},
    {Format::kQ4_K, SourceType::kQ4_K, {0, 2}},        {Format::kQ5_K, SourceType::kQ5_K, {0, 2}},
    {Format::kQ6_K, SourceType::kQ6_K, {208}},         {Format::kIQ4_NL, SourceType::kIQ4_NL, {0}},
    {Format::kIQ4_XS, SourceType::kIQ4_XS, {0}},       {Format::kMXFP4, SourceType::kMXFP4, {}},
    {Format::kINT4_G128, SourceType::kINT4_G128, {0}}, {Format::kINT4_G64, SourceType::kINT4_G64, {0}},
    {Format::kINT4_G32, SourceType::kINT4_G32, {0}},   {Format::kINT8_G128, SourceType::kINT8_G128, {0}},
    {Format::kFP8, SourceType::kF8_E4M3, {}},          {Format::kLEVELS_IQ2, SourceType::kLEVELS_IQ2, {0}},
    {Format::kLEVELS_IQ3_XXS, SourceType::kLEVELS_IQ3_XXS, {0}},
    {Format::kLEVELS_IQ3_S, SourceType::kLEVELS_IQ3_S, {0}}, {Format::kNVFP4, SourceType::kNVFP4, {}}};

template <typename Source>
constexpr bool kHasZeroPoint = std::is_base_of_v<source::IntegerGroups<Source, Source::kGroup>, Source>;

// How far results may be off: activations are rounded as weights are, or to 16 bits.
double tolerance_of(Format format, bool is_wide = false) {
  return format == Format::kF32 ? 1e-5 : is_wide ? 1e-4 : 1.5e-2;
}

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

// Zeros, aligned to 64 bytes.
struct Aligned {
  explicit Aligned(int64_t bytes) : memory(static_cast<uint8_t*>(std::aligned_alloc(64, round_up(bytes, 64)))) {
    std::memset(memory.get(), 0, bytes);
  }
  uint8_t* get() const { return memory.get(); }
  std::unique_ptr<uint8_t, Free> memory;
};

// A packed matrix and the exact values that it stands for.
struct Weight {
  Weight(Format format, const Floats& source, int64_t rows, int64_t cols, const std::vector<int64_t>& places)
      : Weight(format, SourceType::kF32, source.data(), rows, cols, places) {}
  Weight(Format format, SourceType type, const void* source, int64_t rows, int64_t cols,
         const std::vector<int64_t>& places)
      : storage(matrix_bytes(format, rows, cols)), matrix{format, rows, cols, storage.get()}, values(rows * cols) {
    pack_rows(format, type, source, cols, places.data(), static_cast<int64_t>(places.size()), storage.get());
    unpack_rows(matrix, nullptr, rows, values.data());
  }
  Aligned storage;
  Matrix matrix;
  Floats values;
};

std::vector<int64_t> in_order(int64_t count) {
  std::vector<int64_t> places(count);
  for (int64_t i = 0; i < count; ++i) places[i] = i;
  return places;
}

Weight random_weight(Format format, int64_t rows, int64_t cols) {
  return Weight(format, random_floats(rows * cols), rows, cols, in_order(rows));
}

std::vector<double> product(const float* x, const Floats& weight, int64_t rows, int64_t cols) {
  std::vector<double> out(rows);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t k = 0; k < cols; ++k) out[n] += static_cast<double>(x[k]) * weight[n * cols + k];
  }
  return out;
}

// ---- packing ----

// Each thread brings every third row, so that all of them write into every band.
void check_packing_from_several_threads() {
  constexpr int64_t kRows = 60, kCols = 70;
  const Floats source = random_floats(kRows * kCols);
  for (const Format format : kFormats) {
    const Weight want(format, source, kRows, kCols, in_order(kRows));
    Aligned storage(matrix_bytes(format, kRows, kCols));
    std::vector<std::thread> threads;
    for (int64_t first = 0; first < 3; ++first) {
      threads.emplace_back([&, first] {
        for (int64_t row = first; row < kRows; row += 3) {
          pack_rows(format, SourceType::kF32, source.data() + row * kCols, kCols, &row, 1, storage.get());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    Floats values(kRows * kCols);
    unpack_rows(Matrix{format, kRows, kCols, storage.get()}, nullptr, kRows, values.data());
    expect(values == want.values, "packing from several threads");
  }
}

// Two of three rows, in any order.
void check_copying(const Weight& weight, const std::vector<int64_t>& places) {
  const std::vector<int64_t> rows(places.begin(), places.begin() + (places.size() * 2 + 2) / 3);
  const int64_t cols = weight.matrix.cols, num_rows = static_cast<int64_t>(rows.size());
  Aligned storage(matrix_bytes(weight.matrix.format, num_rows, cols));
  copy_rows(weight.matrix, rows.data(), num_rows, storage.get());
  Floats values(num_rows * cols), want;
  unpack_rows(Matrix{weight.matrix.format, num_rows, cols, storage.get()}, nullptr, num_rows, values.data());
  for (const int64_t row : rows) {
    const auto values_of_row = weight.values.begin() + row * cols;
    want.insert(want.end(), values_of_row, values_of_row + cols);
  }
  expect(values == want, "copied rows");
}

void check_packing() {
  for (const Format format : kFormats) {
    for (const int64_t rows : {1, 16, 17, 40}) {
      for (const int64_t cols : {1, 31, 32, 33, 70}) {
        const Floats source = random_floats(rows * cols);
        std::vector<int64_t> places = in_order(rows);
        std::shuffle(places.begin(), places.end(), generator);
        const Weight weight(format, source, rows, cols, places);
        std::vector<double> want(rows * cols);
        for (int64_t i = 0; i < rows * cols; ++i) want[places[i / cols] * cols + i % cols] = source[i];
        const double tolerance = format == Format::kF32 ? 0 : format >= Format::kINT4 ? 0.15 : 0.01;
        expect_close(weight.values.data(), want, tolerance, std::string("packing as ") + name_of(format));
        check_copying(weight, places);
      }
    }
  }
  check_packing_from_several_threads();
  std::vector<uint8_t> blocks(3 * 2 * 34);
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(generator());
  for (size_t at = 0; at < blocks.size(); at += 34) blocks[at] = 0, blocks[at + 1] = 0x38;  // half of 0.5
  Aligned storage(matrix_bytes(Format::kINT8, 3, 64));
  pack_rows(Format::kINT8, SourceType::kQ8_0, blocks.data(), 64, in_order(3).data(), 3, storage.get());
  Floats values(3 * 64);
  unpack_rows(Matrix{Format::kINT8, 3, 64, storage.get()}, nullptr, 3, values.data());
  for (int64_t i = 0; i < 3 * 64; ++i) {
    expect(values[i] == 0.5f * static_cast<int8_t>(blocks[i / 32 * 34 + 2 + i % 32]), "a packed block");
  }
}

// ---- dense layers ----

void check_linear(const Isa& isa, bool is_wide) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {15, 31}, {17, 33}, {64, 32}, {130, 70}, {40, 600}};
  for (const Format format : kFormats) {
    for (const auto& [outputs, inputs] : sizes) {
      Weight weight = random_weight(format, outputs, inputs);
      weight.matrix.is_wide = is_wide && format >= Format::kINT8;
      const Floats bias = random_floats(outputs);
      for (const int64_t rows : {0, 1, 2, 7, 13, 97}) {
        const int64_t stride = inputs + 3;
        const Floats x = random_floats(rows * stride), residual = random_floats(rows * outputs);
        Floats out(rows * outputs), alone(outputs);
        linear(isa, {weight.matrix, x.data(), rows, stride, bias.data(), residual.data(), out.data()});
        std::vector<double> want;
        double squares = 0;
        for (int64_t row = 0; row < rows; ++row) {
          std::vector<double> values = product(x.data() + row * stride, weight.values, outputs, inputs);
          for (int64_t n = 0; n < outputs; ++n) {
            want.push_back(values[n] + bias[n] + residual[row * outputs + n]);
            squares += values[n] * values[n];
          }
          linear(isa, {weight.matrix, x.data() + row * stride, 1, stride, bias.data(), residual.data() + row * outputs,
                       alone.data()});
          expect(std::memcmp(alone.data(), out.data() + row * outputs, outputs * 4) == 0, "a row beside others");
        }
        const double tolerance = tolerance_of(format, weight.matrix.is_wide);
        expect_close(out.data(), want, tolerance, std::string("linear in ") + name_of(format), squares);
      }
    }
  }
}

// Heads with matrices of their own, whose rows are filled up to whole bands: as one product a head.
void check_linear_of_heads(const Isa& isa) {
  constexpr int64_t kHeads = 3;
  for (const Format format : kFormats) {
    for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 31}, {15, 33}, {32, 64}, {70, 40}}) {
      const int64_t band_rows = round_up(outputs, kBand);
      const Weight weight = random_weight(format, kHeads * band_rows, inputs);
      for (const int64_t rows : {0, 1, 7, 97}) {
        const int64_t x_stride = kHeads * (inputs + 2), out_stride = kHeads * (outputs + 1);
        const Floats x = random_floats(rows * x_stride);
        Floats out(rows * out_stride), alone(rows * outputs);
        LinearCall call{weight.matrix, x.data(), rows, x_stride, nullptr, nullptr, out.data()};
        call.out_stride = out_stride, call.num_heads = kHeads, call.head_rows = outputs;
        call.x_head_stride = inputs + 2, call.out_head_stride = outputs + 1;
        linear(isa, call);
        for (int64_t head = 0; head < kHeads; ++head) {
          Matrix own = weight.matrix;
          own.rows = outputs;
          own.data = weight.matrix.band(head * band_rows / kBand);
          linear(isa, {own, x.data() + head * (inputs + 2), rows, x_stride, nullptr, nullptr, alone.data()});
          for (int64_t row = 0; row < rows; ++row) {
            const float* const got = out.data() + row * out_stride + head * (outputs + 1);
            expect(std::memcmp(got, alone.data() + row * outputs, outputs * 4) == 0, "a head beside others");
            expect(got[outputs] == 0, "what lies between heads");
          }
        }
      }
    }
  }
}

// Random codes and small scales. Numbers are of either sign: fp16 from 1/128 to 1/64, bfloat16 from 1/128 to 1/32;
// MXFP4's are eight powers of two. Zero points are up to one more than codes.
void make_numbers_valid(const BlockKind& kind, uint8_t* block) {
  for (const int half : kind.halves) block[half + 1] = static_cast<uint8_t>((block[half + 1] & 0x83) | 0x20);
  if (kind.type == SourceType::kMXFP4) block[0] = static_cast<uint8_t>(118 + block[0] % 8);
  with_source_type(kind.type, [&](auto it) {
    using Source = decltype(it);
    if constexpr (std::is_same_v<Source, source::F8_E4M3>) {
      const float scale = std::normal_distribution<float>(0, 0.01f)(generator);
      std::memcpy(block, &scale, sizeof(scale));
      for (int i = it.kHead; i < it.kBytes; ++i) block[i] ^= (block[i] & 0x7f) == 0x7f;  // no NaN
    }
    if constexpr (std::is_same_v<Source, source::NVFP4>) {
      for (int i = it.kSmall; i < it.kCodes; ++i) block[i] = static_cast<uint8_t>(block[i] % 127);
    }
    if constexpr (kHasZeroPoint<Source>) {
      const int most = std::is_same_v<Source, source::INT8_G128> ? 255 : 15;
      const bool is_bf16 = generator() % 2 != 0;
      if (is_bf16) block[1] = static_cast<uint8_t>((block[1] & 0x80) | 0x3c);
      const uint16_t zero = static_cast<uint16_t>(generator() % (most + 2) | (is_bf16 ? it.kIsBF16 : 0));
      std::memcpy(block + 2, &zero, sizeof(zero));
      for (int i = it.kHead; i < it.kBytes; ++i) block[i] = static_cast<uint8_t>(block[i] & most);
    }
  });
}

std::vector<uint8_t> random_blocks(const BlockKind& kind, int64_t rows, int64_t cols) {
  std::vector<uint8_t> blocks(rows * row_bytes(kind.type, cols));
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(generator());
  const int64_t block_bytes = with_source_type(kind.type, [](auto it) -> int64_t { return it.kBytes; });
  for (size_t at = 0; at < blocks.size(); at += block_bytes) make_numbers_valid(kind, blocks.data() + at);
  if (kind.type != SourceType::kNVFP4) return blocks;
  // Each row has a factor of its own, every second one a divisor.
  for (int64_t row = 0; row < rows; ++row) {
    const float size = std::uniform_real_distribution<float>(0.5f, 1.0f)(generator);
    const float factor = row % 2 == 0 ? size : -1 / size;
    for (int64_t k = 0; k < cols; k += source::NVFP4::kGroup) {
      std::memcpy(blocks.data() + row * row_bytes(kind.type, cols) + row_bytes(kind.type, k), &factor, sizeof(factor));
    }
  }
  return blocks;
}

// The values that products compute with where a row comes in the form `kind`; `cols` are whole groups.
Floats as_prepared(Activation kind, const float* x, int64_t cols) {
  Floats values(x, x + cols);
  if (kind == Activation::kBF16) {
    for (float& value : values) value = bf16_to_float(float_to_bf16(value));
  } else if (kind != Activation::kF32) {
    const float most = kind == Activation::kInt8 ? 127 : 32767;
    for (auto group = values.begin(); group < values.end(); group += kGroup) {
      float largest = 0;
      for (int64_t i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(group[i]));
      for (int64_t i = 0; i < kGroup; ++i) group[i] = std::nearbyint(group[i] * (most / largest)) * (largest / most);
    }
  }
  return values;
}

// What blocks stand for, to the bit; and products of them with rounded activations, which only sums round further.
void check_blocks(const Isa& isa, const BlockKind& kind, int64_t outputs, int64_t inputs) {
  const std::vector<uint8_t> blocks = random_blocks(kind, outputs, inputs);
  const std::string name = name_of(kind.format);
  Weight weight(kind.format, kind.type, blocks.data(), outputs, inputs, in_order(outputs));
  Floats want_values(outputs * inputs);
  for (int64_t row = 0; row < outputs; ++row) {
    with_source_type(kind.type, [&](auto it) {
      it.read(blocks.data() + row * row_bytes(kind.type, inputs), 0, inputs, want_values.data() + row * inputs);
    });
  }
  expect(weight.values == want_values, "unpacking of " + name);
  check_copying(weight, in_order(outputs));
  for (const bool is_wide : {false, true}) {
    weight.matrix.is_wide = is_wide;
    const Activation activation = isa.activation(weight.matrix);
    if (is_wide && activation != Activation::kInt16) continue;  // the same again
    constexpr int64_t kMostRows = 26;
    const Floats x = random_floats(kMostRows * inputs);
    Floats alone(kMostRows * outputs);
    std::vector<double> want;
    for (int64_t row = 0; row < kMostRows; ++row) {
      const float* const own = x.data() + row * inputs;
      const Floats values = as_prepared(activation, own, inputs);
      for (const double value : product(values.data(), weight.values, outputs, inputs)) want.push_back(value);
      linear(isa, {weight.matrix, own, 1, inputs, nullptr, nullptr, alone.data() + row * outputs});
    }
    for (const int64_t rows : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{13}, kMostRows}) {
      Floats out(rows * outputs);
      linear(isa, {weight.matrix, x.data(), rows, inputs, nullptr, nullptr, out.data()});
      expect(std::memcmp(alone.data(), out.data(), out.size() * sizeof(float)) == 0, "rows beside others, " + name);
    }
    expect_close(alone.data(), want, 1e-5, "linear in " + name);
  }
}

void check_blocks(const Isa& isa) {
  size_t num_formats = kFormats.size() + kBlockKinds.size();
#define MOEFLOW_ROW(NAME) --num_formats;
  MOEFLOW_FORMATS(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  expect(num_formats == 0, "the list of formats");
  for (const BlockKind& kind : kBlockKinds) {
    for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{16, 256}, {17, 512}, {70, 256}}) {
      check_blocks(isa, kind, outputs, inputs);
    }
  }
}

void check_norm_before_linear(const Isa& isa) {
  for (const Format format : kFormats) {
    for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{17, 33}, {600, 70}}) {
      const Weight weight = random_weight(format, outputs, inputs);
      const Floats weights = random_floats(inputs), bias = random_floats(inputs);
      for (const Norm& norm : {Norm{weights.data(), 1e-6f}, Norm{weights.data(), 1e-6f, true, bias.data()}}) {
        for (const int64_t rows : {1, 5, 40}) {
          const Floats x = random_floats(rows * inputs);
          Floats normed(rows * inputs), want(rows * outputs), got(rows * outputs);
          normalise(isa, {x.data(), norm, rows, inputs, normed.data()});
          linear(isa, {weight.matrix, normed.data(), rows, inputs, nullptr, nullptr, want.data()});
          linear(isa, {weight.matrix, x.data(), rows, inputs, nullptr, nullptr, got.data(), norm});
          expect(got == want, "a norm on the way into a product");
        }
      }
    }
  }
}

// ---- experts ----

// A layer of random experts, and their expected results.
struct Experts {
  Experts(Format format, int64_t num_experts, int64_t hidden, int64_t width, Nonlinearity function, bool is_gated,
          bool has_bias)
      : layer{nullptr, nullptr, num_experts, hidden, width, function, is_gated} {
    const int64_t rows = layer.num_up_rows();
    std::vector<int64_t> places;  // gated: gate 0..15, up 0..15, gate 16..31, ...
    for (int half = 0; half < (is_gated ? 2 : 1); ++half) {
      for (int64_t i = 0; i < width; ++i) places.push_back(place(i) + half * kBand);
    }
    const float scale = 1 / std::sqrt(static_cast<float>(hidden));
    for (int64_t e = 0; e < num_experts; ++e) {
      const Floats source = random_floats(static_cast<int64_t>(places.size()) * hidden, scale);
      ups.emplace_back(format, source, rows, hidden, places);
      downs.push_back(random_weight(format, hidden, width));
    }
    for (const Weight& weight : ups) up_matrices.push_back(weight.matrix);
    for (const Weight& weight : downs) down_matrices.push_back(weight.matrix);
    layer.up = up_matrices.data(), layer.down = down_matrices.data();
    layer.alpha = 1.7f, layer.limit = 0.8f;
    if (!has_bias) return;
    const int64_t halves = is_gated ? 2 : 1;
    up_bias = random_floats(num_experts * halves * width), down_bias = random_floats(num_experts * hidden);
    layer.biases = {up_bias.data(), up_bias.data() + (halves - 1) * width, down_bias.data(), halves * width, hidden};
  }

  // The row of a unit, or gated of its gate, which kBand rows further has its up.
  int64_t place(int64_t unit) const { return layer.is_gated ? unit / kBand * 2 * kBand + unit % kBand : unit; }

  std::vector<double> run(int64_t expert, const float* x) const {
    std::vector<double> units = product(x, ups[expert].values, layer.num_up_rows(), layer.hidden);
    const ExpertBiases& biases = layer.biases;
    Floats h(layer.width);
    for (int64_t i = 0; i < layer.width; ++i) {
      double first = units[place(i)], up = layer.is_gated ? units[place(i) + kBand] : 0;
      if (biases.up != nullptr) {
        first += (layer.is_gated ? biases.gate : biases.up)[expert * biases.up_stride + i];
        up += biases.up[expert * biases.up_stride + i];
      }
      h[i] = static_cast<float>(layer.is_gated ? gated(first, up) : apply(first));
    }
    std::vector<double> out = product(h.data(), downs[expert].values, layer.hidden, layer.width);
    for (size_t i = 0; i < out.size() && biases.down != nullptr; ++i) out[i] += down_bias[expert * out.size() + i];
    return out;
  }

  double gated(double gate, double up) const {
    if (layer.function != Nonlinearity::kClampedSwiglu) return apply(gate) * up;
    const double limit = layer.limit;
    gate = std::min(gate, limit);
    return gate / (1 + std::exp(-layer.alpha * gate)) * (std::clamp(up, -limit, limit) + 1);
  }

  double apply(double x) const {
    switch (layer.function) {
      case Nonlinearity::kSilu: return x / (1 + std::exp(-x));
      case Nonlinearity::kGelu: return x * std::erfc(-x / std::sqrt(2.0)) / 2;
      case Nonlinearity::kGeluTanh: return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
      case Nonlinearity::kRelu: return std::max(x, 0.0);
      case Nonlinearity::kClampedSwiglu: break;  // is nothing without a gate
    }
    return 0;
  }

  ExpertLayer layer;
  std::vector<Weight> ups, downs;
  std::vector<Matrix> up_matrices, down_matrices;
  Floats up_bias, down_bias;
};

// The same experts in other places, and in parts, to the bit.
void check_slots(const Isa& isa, const Experts& all, const Floats& x, int64_t tokens, int64_t top_k,
                 const std::vector<int64_t>& ids, const Floats& weights, const Floats& want) {
  const int64_t num_experts = all.layer.num_experts, hidden = all.layer.hidden;
  const std::vector<Matrix> ups(all.up_matrices.rbegin(), all.up_matrices.rend());
  const std::vector<Matrix> downs(all.down_matrices.rbegin(), all.down_matrices.rend());
  std::vector<int32_t> slots(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) slots[e] = static_cast<int32_t>(num_experts - 1 - e);
  ExpertLayer layer = all.layer;
  layer.up = ups.data(), layer.down = downs.data(), layer.slots = slots.data();
  Floats out(tokens * hidden), pairs(tokens * top_k * hidden);
  experts(isa, {layer, x.data(), tokens, top_k, ids.data(), weights.data(), x.data(), out.data()});
  expect(out == want, "experts in slots");
  for (int64_t part = 0; part < 3; ++part) {
    std::vector<int32_t> some(slots);
    for (int64_t e = 0; e < num_experts; ++e) {
      if (e % 3 != part) some[e] = part == 0 ? kLoading : kAbsent;
    }
    layer.slots = some.data();
    expert_pairs(isa, {layer, x.data(), tokens, top_k, ids.data(), weights.data(), nullptr, pairs.data()});
  }
  add_pairs(isa, {pairs.data(), tokens, top_k, hidden, ids.data(), x.data(), out.data()});
  expect(out == want, "experts in parts");
}

// The results of two processes: one has the first band of units and of outputs, the other has the rest.
void check_slices(const Isa& isa, const Experts& all, const Floats& x, int64_t tokens, int64_t top_k,
                  const std::vector<int64_t>& ids, const Floats& weights, const Floats& want) {
  const int64_t hidden = all.layer.hidden, width = all.layer.width, pairs = tokens * top_k;
  const int64_t up_bands = all.layer.is_gated ? 2 : 1;
  const auto bounds = [](int64_t count) { return std::vector<int64_t>{0, std::min<int64_t>(kBand, count), count}; };
  Floats units(pairs * width), out(tokens * hidden);
  for (int part = 0; part < 2; ++part) {
    const int64_t first = bounds(width)[part], count = bounds(width)[part + 1] - first;
    ExpertLayer layer = all.layer;
    layer.width = count, layer.down = nullptr;
    if (layer.biases.up != nullptr) layer.biases.gate += first, layer.biases.up += first;
    std::vector<Matrix> ups;
    for (const Matrix& up : all.up_matrices) {
      const uint8_t* const data = count == 0 ? nullptr : up.band(first / kBand * up_bands);
      ups.push_back({up.format, layer.num_up_rows(), hidden, data});
    }
    layer.up = ups.data();
    const int64_t stride = round_up(count, kBand);
    Floats own(pairs * stride);
    expert_units(isa, {layer, x.data(), tokens, top_k, ids.data(), nullptr, nullptr, own.data()});
    for (int64_t i = 0; i < pairs; ++i) std::copy_n(own.data() + i * stride, count, units.data() + i * width + first);
  }
  for (int part = 0; part < 2; ++part) {
    const int64_t first = bounds(hidden)[part], count = bounds(hidden)[part + 1] - first;
    ExpertLayer layer = all.layer;
    layer.hidden = count, layer.up = nullptr;
    if (layer.biases.down != nullptr) layer.biases.down += first;
    std::vector<Matrix> downs;
    for (const Matrix& down : all.down_matrices) {
      downs.push_back({down.format, count, width, count == 0 ? nullptr : down.band(first / kBand)});
    }
    layer.down = downs.data();
    Floats residual(tokens * count), own(tokens * count);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(x.data() + t * hidden + first, count, residual.data() + t * count);
    const ExpertsCall call{layer, units.data(), tokens, top_k, ids.data(), weights.data(), residual.data(), own.data()};
    expert_sums(isa, call);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(own.data() + t * count, count, out.data() + t * hidden + first);
  }
  expect(out == want, "experts in slices");
}

// Of so many tokens, and of fewer, the first of these: plain loops take longer than the checked operations.
void check_experts(const Isa& isa, Format format, const Experts& all, const std::vector<int64_t>& counts,
                   int64_t top_k) {
  const int64_t num_experts = all.layer.num_experts, hidden = all.layer.hidden, most = counts.back();
  const Floats x = random_floats(most * hidden), weights = random_floats(most * top_k);
  std::vector<int64_t> ids(most * top_k);
  for (int64_t i = 0; i < most * top_k; ++i) ids[i] = (i % top_k + i / top_k % 2 * 2) % num_experts;
  std::vector<double> sums(most * hidden);
  for (int64_t i = 0; i < most * top_k; ++i) {
    const std::vector<double> result = all.run(ids[i], x.data() + i / top_k * hidden);
    for (int64_t c = 0; c < hidden; ++c) sums[i / top_k * hidden + c] += weights[i] * result[c];
  }
  for (int64_t i = 0; i < most * hidden; ++i) sums[i] += x[i];
  for (const int64_t tokens : counts) {
    const std::vector<double> want(sums.begin(), sums.begin() + tokens * hidden);
    Floats out(tokens * hidden);
    experts(isa, {all.layer, x.data(), tokens, top_k, ids.data(), weights.data(), x.data(), out.data()});
    expect_close(out.data(), want, 2 * tolerance_of(format), std::string("experts in ") + name_of(format));
    check_slots(isa, all, x, tokens, top_k, ids, weights, out);
    check_slices(isa, all, x, tokens, top_k, ids, weights, out);
  }
}

void check_experts(const Isa& isa) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {33, 17}, {70, 48}, {130, 33}};
  for (const Format format : kFormats) {
    for (const auto& [hidden, width] : sizes) {
      const Experts all(format, 5, hidden, width, Nonlinearity::kSilu, true, false);
      for (const int64_t top_k : {1, 3}) check_experts(isa, format, all, {0, 1, 3, 9, 40}, top_k);
    }
    for (const Nonlinearity function :
         {Nonlinearity::kSilu, Nonlinearity::kGelu, Nonlinearity::kGeluTanh, Nonlinearity::kRelu,
          Nonlinearity::kClampedSwiglu}) {
      for (const bool is_gated : {true, false}) {
        if (function == Nonlinearity::kClampedSwiglu && !is_gated) continue;
        check_experts(isa, format, Experts(format, 5, 33, 81, function, is_gated, true), {9}, 2);
      }
    }
  }
}

// ---- attention ----

struct Cache {
  Cache(Format format, int64_t blocks, int64_t heads, int64_t block_size, int64_t dim, int64_t latent = 0)
      : cache{format, nullptr, blocks, heads, block_size, dim, latent}, storage(blocks * heads * kv_cell_bytes(cache)) {
    cache.data = storage.get();
  }
  KVCache cache;
  Aligned storage;
};

// Two sequences: one begins with this pass, the other has `start` tokens in the cache; block tables run backwards.
// With `latent`, values are the first so many dimensions of keys.
void check_attention(const Isa& isa, Format format, int64_t start, int64_t dim, int64_t window, bool has_tree,
                     float soft_cap = 0, bool has_sinks = false, int64_t latent = 0) {
  constexpr int64_t kHeads = 4, kKVHeads = 2, kBlockSize = 16;
  const int64_t value_dim = latent > 0 ? latent : dim;
  const int64_t counts[] = {37, 3}, starts[] = {0, start};
  int32_t table_offsets[2], counts32[2], starts32[2], first_tokens[] = {0, static_cast<int32_t>(counts[0])};
  std::vector<int32_t> tables;
  int32_t next_block = static_cast<int32_t>((counts[0] + counts[1] + start) / kBlockSize + 2);
  Cache cache(format, next_block, kKVHeads, kBlockSize, dim, latent);
  const int64_t num_tokens = counts[0] + counts[1];
  const Floats q = random_floats(num_tokens * kHeads * dim), sinks = random_floats(kHeads);
  Floats keys[2], values[2];
  for (int s = 0; s < 2; ++s) {
    starts32[s] = static_cast<int32_t>(starts[s]), counts32[s] = static_cast<int32_t>(counts[s]);
    table_offsets[s] = static_cast<int32_t>(tables.size());
    const int64_t stop = starts[s] + counts[s];
    for (int64_t block = 0; block * kBlockSize < stop; ++block) tables.push_back(--next_block);
    keys[s] = random_floats(stop * kKVHeads * dim), values[s] = random_floats(stop * kKVHeads * dim);
    std::vector<int64_t> slots;
    for (int64_t p = 0; p < stop; ++p) {
      slots.push_back(tables[table_offsets[s] + p / kBlockSize] * kBlockSize + p % kBlockSize);
    }
    if (latent > 0) values[s] = keys[s];
    write_kv({cache.cache, stop, slots.data(), keys[s].data(), latent > 0 ? nullptr : values[s].data(), kKVHeads * dim,
              kKVHeads * dim});
  }
  std::vector<uint64_t> masks(num_tokens);
  for (uint64_t& mask : masks) mask = ~(static_cast<uint64_t>(generator()) << 20);
  const auto sees = [&](int s, int64_t token, int64_t position) {
    const int64_t own = starts[s] + token - first_tokens[s], bit = position - (starts[s] + counts[s] - 64);
    if (position > own) return false;
    if (has_tree) return bit < 0 || (masks[token] >> bit & 1) != 0;
    return window == 0 || position > own - window;
  };
  std::vector<double> want(num_tokens * kHeads * value_dim);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int s = token >= counts[0];
    for (int64_t head = 0; head < kHeads; ++head) {
      double sum = 0;
      double* const out = want.data() + (token * kHeads + head) * value_dim;
      for (int64_t p = 0; p < starts[s] + counts[s]; ++p) {
        if (!sees(s, token, p)) continue;
        const int64_t at = (p * kKVHeads + head / (kHeads / kKVHeads)) * dim;
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += q[(token * kHeads + head) * dim + d] * keys[s][at + d];
        score /= std::sqrt(static_cast<double>(dim));
        if (soft_cap > 0) score = soft_cap * std::tanh(score / soft_cap);
        const double weight = std::exp(score);
        sum += weight;
        for (int64_t d = 0; d < value_dim; ++d) out[d] += weight * values[s][at + d];
      }
      if (has_sinks) sum += std::exp(static_cast<double>(sinks[head]));
      for (int64_t d = 0; d < value_dim && sum > 0; ++d) out[d] /= sum;
    }
  }
  Floats out(num_tokens * kHeads * value_dim);
  AttentionCall call{cache.cache, q.data(), kHeads * dim, kHeads,
                     Sequences{2, first_tokens, starts32, counts32, table_offsets, tables.data()}, window,
                     has_tree ? masks.data() : nullptr, out.data()};
  call.soft_cap = soft_cap;
  call.sinks = has_sinks ? sinks.data() : nullptr;
  attention(isa, call);
  expect_close(out.data(), want, tolerance_of(format), std::string("attention over ") + name_of(format));
}

void check_attention(const Isa& isa) {
  for (const Format format : {Format::kF32, Format::kBF16, Format::kINT8}) {
    for (const int64_t start : {0, 1, 100, 1500}) {
      for (const int64_t dim : {8, 24, 30, 64}) {
        if (start == 1500 && dim % 16 == 8) continue;  // over many pieces, heads that fill vectors and that do not
        check_attention(isa, format, start, dim, 0, false);
        check_attention(isa, format, start, dim, 20, false);
        check_attention(isa, format, start, dim, 0, true);
        check_attention(isa, format, start, dim, 20, false, 2.0f, true);
        check_attention(isa, format, start, dim, 0, true, 0, false, dim / 4 * 2 + 2);
      }
    }
  }
}

// One sequence: as attention of each head to its own keys and values, which are made of the latents here.
void check_latent_attention(const Isa& isa, int64_t tokens, bool has_rank, bool is_interleaved) {
  constexpr int64_t kHeads = 3, kNope = 10, kRope = 6, kLatent = 22, kValue = 7, kRank = 9, kDim = kLatent + kRope;
  constexpr int64_t kQuery = kNope + kRope;
  const int64_t q_size = has_rank ? kRank : kHeads * kQuery, row = q_size + kDim;
  Cache cache(Format::kF32, tokens / 16 + 1, 1, 16, kDim, kLatent);
  const Weight q_b = random_weight(Format::kF32, kHeads * kQuery, kRank);
  const int64_t key_rows = round_up(kLatent, kBand), value_rows = round_up(kValue, kBand);
  const Weight k_b = random_weight(Format::kF32, kHeads * key_rows, kNope);
  const Weight v_b = random_weight(Format::kF32, kHeads * value_rows, kLatent);
  const Floats projected = random_floats(tokens * row), q_norm = random_floats(kRank), norm = random_floats(kLatent);
  const Floats cos = random_floats(tokens * kRope), sin = random_floats(tokens * kRope);
  const std::vector<int64_t> slots = in_order(tokens);
  std::vector<int32_t> blocks;
  for (const int64_t block : in_order(tokens / 16 + 1)) blocks.push_back(static_cast<int32_t>(block));
  LatentProjections by{};
  if (has_rank) by.q_b = q_b.matrix;
  by.q_norm = Norm{q_norm.data(), 1e-6f}, by.latent_norm = Norm{norm.data(), 1e-6f};
  by.k_b = k_b.matrix, by.v_b = v_b.matrix, by.nope_dim = kNope, by.value_dim = kValue;
  by.is_interleaved = is_interleaved;
  const int32_t zero = 0, count = static_cast<int32_t>(tokens);
  Floats out(tokens * kHeads * kValue);
  latent_attention(isa, {by, cache.cache, projected.data(), tokens, kHeads, RotaryTable{cos.data(), sin.data(), kRope},
                         slots.data(), Sequences{1, &zero, &zero, &count, &zero, blocks.data()}, 0, nullptr, 0.3f,
                         out.data()});
  const auto normed = [](const float* x, const Floats& weight) {
    double squares = 0;
    const size_t size = weight.size();
    for (size_t i = 0; i < size; ++i) squares += static_cast<double>(x[i]) * x[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
    std::vector<double> values;
    for (size_t i = 0; i < size; ++i) values.push_back(x[i] * scale * weight[i]);
    return values;
  };
  const auto rotated = [&](const double* x, int64_t token) {
    std::vector<double> halves(kRope), values(kRope);
    for (int64_t i = 0; i < kRope; ++i) halves[i] = x[is_interleaved ? i % (kRope / 2) * 2 + i / (kRope / 2) : i];
    for (int64_t i = 0; i < kRope; ++i) {
      values[i] = halves[i] * cos[token * kRope + i] + halves[(i + kRope / 2) % kRope] * sin[token * kRope + i];
    }
    return values;
  };
  std::vector<std::vector<double>> latents, keys, queries(tokens);
  for (int64_t token = 0; token < tokens; ++token) {
    const float* const own = projected.data() + token * row;
    latents.push_back(normed(own + q_size, norm));
    const std::vector<double> key(own + q_size + kLatent, own + row);
    keys.push_back(rotated(key.data(), token));
    queries[token].assign(own, own + q_size);
    if (!has_rank) continue;
    const std::vector<double> down = normed(own, q_norm);
    queries[token].assign(kHeads * kQuery, 0);
    for (int64_t n = 0; n < kHeads * kQuery; ++n) {
      for (int64_t k = 0; k < kRank; ++k) queries[token][n] += q_b.values[n * kRank + k] * down[k];
    }
  }
  std::vector<double> want(out.size());
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < kHeads; ++head) {
      const double* const q = queries[token].data() + head * kQuery;
      const std::vector<double> turned = rotated(q + kNope, token);
      double sum = 0;
      double* const attended = want.data() + (token * kHeads + head) * kValue;
      for (int64_t p = 0; p <= token; ++p) {
        double score = 0;
        for (int64_t n = 0; n < kNope; ++n) {
          double key = 0;
          for (int64_t l = 0; l < kLatent; ++l) key += k_b.values[(head * key_rows + l) * kNope + n] * latents[p][l];
          score += q[n] * key;
        }
        for (int64_t i = 0; i < kRope; ++i) score += turned[i] * keys[p][i];
        const double weight = std::exp(score * 0.3);
        sum += weight;
        for (int64_t v = 0; v < kValue; ++v) {
          double value = 0;
          for (int64_t l = 0; l < kLatent; ++l) value += v_b.values[(head * value_rows + v) * kLatent + l] * latents[p][l];
          attended[v] += weight * value;
        }
      }
      for (int64_t v = 0; v < kValue; ++v) attended[v] /= sum;
    }
  }
  expect_close(out.data(), want, 1e-4, "latent attention");
}

void check_latent_attention(const Isa& isa) {
  for (const int64_t tokens : {1, 37}) {
    for (const bool has_rank : {false, true}) {
      for (const bool is_interleaved : {false, true}) check_latent_attention(isa, tokens, has_rank, is_interleaved);
    }
  }
}

// A sequence may bring no tokens to a pass.
void check_attention_of_nothing(const Isa& isa) {
  constexpr int64_t kDim = 8;
  Cache cache(Format::kF32, 4, 1, 16, kDim);
  const int32_t first_tokens[] = {0, 0, 1}, starts[] = {20, 0, 0}, counts[] = {0, 1, 0}, offsets[] = {0, 2, 3};
  const int32_t tables[] = {0, 1, 2, 3};
  const int64_t slot = 2 * 16;
  const Floats q = random_floats(kDim), k = random_floats(kDim), v = random_floats(kDim);
  Floats out(kDim);
  write_kv({cache.cache, 1, &slot, k.data(), v.data(), kDim, kDim});
  attention(isa, {cache.cache, q.data(), kDim, 1, Sequences{3, first_tokens, starts, counts, offsets, tables}, 0,
                  nullptr, out.data()});
  expect(out == v, "attention to oneself");
}

// ---- small operations ----

void check_norm(const Isa& isa, int64_t rows, int64_t size, bool subtracts_mean) {
  const Floats x = random_floats(rows * size), weight = random_floats(size), bias = random_floats(size);
  std::vector<double> want(rows * size);
  for (int64_t row = 0; row < rows; ++row) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; subtracts_mean && i < size; ++i) mean += x[row * size + i] / static_cast<double>(size);
    for (int64_t i = 0; i < size; ++i) squares += (x[row * size + i] - mean) * (x[row * size + i] - mean);
    for (int64_t i = 0; i < size; ++i) {
      const double scaled = (x[row * size + i] - mean) / std::sqrt(squares / static_cast<double>(size) + 1e-3);
      want[row * size + i] = scaled * weight[i] + (subtracts_mean ? bias[i] : 0);
    }
  }
  Floats out(rows * size);
  const Norm norm{weight.data(), 1e-3f, subtracts_mean, bias.data()};
  normalise(isa, {x.data(), norm, rows, size, out.data()});
  expect_close(out.data(), want, 1e-5, subtracts_mean ? "layer norm" : "rms norm");
}

// Within the chosen groups, no expert left out ranks better than a chosen one.
void check_route(const Isa& isa, int64_t rows, int64_t num_experts, Routing routing) {
  const Floats logits = random_floats(rows * num_experts, 4), bias = random_floats(num_experts);
  routing.choice_bias = routing.score == ScoreFunction::kSigmoid ? bias.data() : nullptr;
  constexpr double kClose = 1e-6;  // rounding may order such as these otherwise
  const int64_t top_k = routing.top_k, size = num_experts / routing.num_groups;
  std::vector<int64_t> ids(rows * top_k);
  Floats weights(rows * top_k);
  route(isa, {routing, logits.data(), rows, num_experts, ids.data(), weights.data()});
  std::vector<double> want;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const x = logits.data() + row * num_experts;
    std::vector<double> scores(num_experts), ranks(num_experts), groups(routing.num_groups);
    double sum = 0, total = 0;
    for (int64_t e = 0; e < num_experts; ++e) sum += std::exp(static_cast<double>(x[e]));
    for (int64_t e = 0; e < num_experts; ++e) {
      const double power = std::exp(static_cast<double>(x[e]));
      scores[e] = routing.score == ScoreFunction::kSoftmax ? power / sum : power / (1 + power);
      ranks[e] = scores[e] + (routing.choice_bias == nullptr ? 0 : bias[e]);
    }
    for (int64_t group = 0; group < routing.num_groups; ++group) {
      std::vector<double> own(ranks.begin() + group * size, ranks.begin() + (group + 1) * size);
      std::sort(own.begin(), own.end(), std::greater<double>());
      groups[group] = own[0] + (routing.group_score == GroupScore::kTopTwoSum ? own[1] : 0);
    }
    const int64_t* const own = ids.data() + row * top_k;
    for (int64_t k = 0; k < top_k; ++k) total += scores[own[k]];
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t num_better = 0, num_better_groups = 0;
      for (int64_t group = 0; group < routing.num_groups; ++group) num_better_groups += groups[group] > groups[own[k] / size] + kClose;
      for (int64_t e = 0; e < num_experts; ++e) {
        int64_t place = 0;
        for (int64_t group = 0; group < routing.num_groups; ++group) place += groups[group] > groups[e / size] - kClose;
        num_better += place <= routing.num_chosen_groups && ranks[e] > ranks[own[k]] + kClose;
      }
      expect(num_better <= k && num_better_groups < routing.num_chosen_groups, "a router's choice");
      want.push_back(scores[own[k]] / (routing.renormalize ? total : 1) * routing.scale);
    }
  }
  expect_close(weights.data(), want, 1e-5, "a router's weights");
}

void check_routes(const Isa& isa, int64_t rows, int64_t num_experts) {
  Routing routing;
  routing.top_k = std::min<int64_t>(num_experts, 8);
  check_route(isa, rows, num_experts, routing);
  routing.score = ScoreFunction::kSigmoid, routing.renormalize = true, routing.scale = 2.5f;
  check_route(isa, rows, num_experts, routing);
  if (num_experts % 5 != 0 || num_experts < 10) return;
  routing.num_groups = 5, routing.num_chosen_groups = 4, routing.group_score = GroupScore::kTopTwoSum;
  check_route(isa, rows, num_experts, routing);
  routing.score = ScoreFunction::kSoftmax, routing.group_score = GroupScore::kMax;
  check_route(isa, rows, num_experts, routing);
}

void check_largest(const Isa& isa, int64_t rows, int64_t size) {
  const Floats x = random_floats(rows * size);
  std::vector<RowSampling> samplings;
  for (int64_t row = 0; row < rows; ++row) samplings.push_back({row, 0, 3, 0.5, 0, 0.9});
  std::vector<int64_t> tokens(rows);
  sample(isa, {x.data(), rows, size, samplings.data(), rows, tokens.data()});
  for (int64_t row = 0; row < rows; ++row) {
    const auto first = x.begin() + row * size;
    expect(std::max_element(first, first + size) - first == tokens[row], "the place of the maximum");
  }
}

// Each number must fall into the part of the distribution that belongs to the token sampled.
void check_draw(const Isa& isa, int64_t rows, int64_t size, int64_t top_k, double top_p) {
  const Floats x = random_floats(rows * size, 2);
  std::vector<RowSampling> samplings;
  for (int64_t row = 0; row < rows; ++row) {
    samplings.push_back({row, 0.7f, top_k, top_p, 0.01f, static_cast<double>(row % 5) / 5});
  }
  std::vector<int64_t> tokens(rows), order(size);
  sample(isa, {x.data(), rows, size, samplings.data(), rows, tokens.data()});
  for (int64_t row = 0; row < rows; ++row) {
    const float* const own = x.data() + row * size;
    const float max_logit = *std::max_element(own, own + size);
    std::vector<double> weights(size);
    double all = 0, total = 0, before = 0;
    for (int64_t i = 0; i < size; ++i) order[i] = i;
    const auto is_likelier = [&](int64_t a, int64_t b) { return own[a] > own[b] || (own[a] == own[b] && a < b); };
    if (top_k > 0 || top_p < 1) std::sort(order.begin(), order.end(), is_likelier);
    for (int64_t i = 0; i < size; ++i) {
      weights[i] = top_k > 0 && i >= top_k ? 0 : std::exp((own[order[i]] - max_logit) / 0.7);
      all += weights[i];
    }
    for (int64_t i = 0; i < size; ++i) {
      const double weight = weights[i];
      if ((top_p < 1 && before >= top_p * all) || weight < 0.01f) weights[i] = 0;
      before += weight, total += weights[i];
    }
    int64_t place = 0;
    for (before = 0; place < size - 1 && order[place] != tokens[row]; ++place) before += weights[place];
    const double threshold = samplings[row].number * total;
    expect(order[place] == tokens[row] && before <= threshold + 1e-5 * total &&
               threshold <= before + weights[place] + 1e-5 * total,
           "a token sampled");
  }
}

void check_attention_input(const Isa& isa, int64_t tokens, int64_t dim, int64_t rotary_dim, bool norm_all_heads,
                           bool norms_last, bool is_interleaved) {
  constexpr int64_t kHeads = 4, kKVHeads = 2, kAll = kHeads + 2 * kKVHeads;
  Cache cache(Format::kF32, tokens / 16 + 1, kKVHeads, 16, dim);
  Floats qkv = random_floats(tokens * kAll * dim), cos = random_floats(tokens * dim);
  const Floats sin = random_floats(tokens * dim);
  const Floats before = qkv, norms = random_floats(kHeads * dim);
  const std::vector<int64_t> slots = in_order(tokens);
  attention_input(isa, {cache.cache, qkv.data(), tokens, kHeads, norms.data(), norms.data(), norm_all_heads, 1e-6f, 0,
                        RotaryTable{cos.data(), sin.data(), rotary_dim}, slots.data(), norms_last, is_interleaved});
  std::vector<double> want;
  Floats got;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t head = 0; head < kHeads + kKVHeads; ++head) {
      const float* const row = before.data() + token * kAll * dim;
      const bool is_key = head >= kHeads;
      const int64_t own = is_key ? head - kHeads : head, heads = is_key ? kKVHeads : kHeads;
      const float* const first = norm_all_heads ? row + (is_key ? kHeads * dim : 0) : row + head * dim;
      const int64_t size = norm_all_heads ? heads * dim : dim;
      double squares = 0;
      for (int64_t i = 0; i < size; ++i) squares += static_cast<double>(first[i]) * first[i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
      const float* const norm = norms.data() + (norm_all_heads ? own * dim : 0);
      const auto value = [&](int64_t d) {  // of a place as it is rotated, where neighbours come apart
        const int64_t half = rotary_dim / 2;
        const int64_t at = !is_interleaved || d >= rotary_dim ? d : d < half ? 2 * d : 2 * (d - half) + 1;
        return row[head * dim + at] * (norms_last ? 1 : scale * norm[at]);
      };
      std::vector<double> prepared(dim);
      double rotated_squares = 0;
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t at = token * rotary_dim + d;
        prepared[d] = d >= rotary_dim ? value(d)
                                      : value(d) * cos[at] + value((d + rotary_dim / 2) % rotary_dim) * sin[at];
        rotated_squares += prepared[d] * prepared[d];
      }
      const double last = norms_last ? 1 / std::sqrt(rotated_squares / static_cast<double>(dim) + 1e-6) : 1;
      for (int64_t d = 0; d < dim; ++d) {
        want.push_back(prepared[d] * (norms_last ? last * norm[d] : 1));
        const float* const cell = reinterpret_cast<const float*>(kv_cell(cache.cache, slots[token] / 16, own));
        got.push_back(is_key ? cell[d * 16 + slots[token] % 16] : qkv[(token * kAll + head) * dim + d]);
      }
    }
  }
  expect_close(got.data(), want, 1e-5, "attention_input");

  Floats queries;  // of a layer without keys of its own
  for (int64_t token = 0; token < tokens; ++token) {
    const float* const row = before.data() + token * kAll * dim;
    queries.insert(queries.end(), row, row + kHeads * dim);
  }
  AttentionInputCall alone{cache.cache, queries.data(), tokens, kHeads, norms.data(), nullptr, norm_all_heads, 1e-6f, 0,
                           RotaryTable{cos.data(), sin.data(), rotary_dim}, slots.data(), norms_last, is_interleaved};
  alone.has_keys = false;
  attention_input(isa, alone);
  for (int64_t token = 0; token < tokens; ++token) {
    const float* const row = qkv.data() + token * kAll * dim;
    expect(std::equal(row, row + kHeads * dim, queries.data() + token * kHeads * dim), "queries alone");
  }
}

void check_layer_input(const Isa& isa, Format format, int64_t tokens) {
  constexpr int64_t kHidden = 70, kSize = 37, kLayers = 3;
  const Weight gate = random_weight(format, kSize, kHidden), projection = random_weight(format, kHidden, kSize);
  const Floats inputs = random_floats(tokens * kLayers * kSize), norm = random_floats(kHidden),
               scale = random_floats(1), hidden = random_floats(tokens * kHidden);
  Floats got = hidden, gates(tokens * kSize), added(tokens * kHidden);
  const LayerInput layer{gate.matrix, projection.matrix, {norm.data(), 1e-6f}, Nonlinearity::kGeluTanh, scale.data()};
  layer_input(isa, {layer, inputs.data() + kSize, kLayers * kSize, tokens, got.data()});  // of the second layer

  linear(isa, {gate.matrix, hidden.data(), tokens, kHidden, nullptr, nullptr, gates.data()});
  for (int64_t i = 0; i < tokens * kSize; ++i) {
    const double x = gates[i], share = (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2;
    gates[i] = static_cast<float>(x * share * inputs[(i / kSize * kLayers + 1) * kSize + i % kSize]);
  }
  linear(isa, {projection.matrix, gates.data(), tokens, kSize, nullptr, nullptr, added.data()});
  normalise(isa, {added.data(), layer.norm, tokens, kHidden, added.data()});
  std::vector<double> want;
  for (int64_t i = 0; i < tokens * kHidden; ++i) want.push_back((static_cast<double>(hidden[i]) + added[i]) * scale[0]);
  // Integers may round a unit's last bit to the next step.
  expect_close(got.data(), want, format == Format::kF32 || format == Format::kBF16 ? 1e-4 : 0.1, "layer_input");
}

// Two sequences of a pass in one memory of slots: the second begins where the first has kept its state after two tokens.
struct TwoSequences {
  std::vector<int32_t> firsts{0, 5}, counts{5, 3}, sources{-1, 2}, targets{0, 1}, ends{1, 1}, after{2}, slots{2};
  StateSequences call() const {
    return {2, firsts.data(), counts.data(), sources.data(), targets.data(), ends.data(), after.data(), slots.data()};
  }
  // The tokens that come before each of them in its sequence, and itself.
  static std::vector<int64_t> history(int64_t row) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < (row < 5 ? row + 1 : 2); ++i) rows.push_back(i);
    for (int64_t i = 5; i <= row; ++i) rows.push_back(i);
    return rows;
  }
};

void check_short_conv(const Isa& isa, int64_t channels, int64_t taps) {
  const TwoSequences two;
  const Floats x = random_floats(8 * 3 * channels), weight = random_floats(channels * taps), bias = random_floats(channels);
  Floats states(3 * (taps - 1) * channels + 3), out(8 * channels);
  const int64_t stride = 3 * channels;
  const ShortConvCall call{x.data(), x.data() + channels, x.data() + 2 * channels, stride, weight.data(), bias.data(),
                           channels, taps, false, {states.data(), (taps - 1) * channels + 1, 1}, two.call(), out.data()};
  short_conv(isa, call);
  std::vector<double> want;
  for (int64_t row = 0; row < 8; ++row) {
    const std::vector<int64_t> seen = TwoSequences::history(row);
    for (int64_t c = 0; c < channels; ++c) {
      double sum = bias[c];
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t at = static_cast<int64_t>(seen.size()) - taps + tap;
        if (at < 0) continue;
        const float* const token = x.data() + seen[at] * stride + c;
        sum += static_cast<double>(weight[c * taps + tap]) * token[0] * token[channels];
      }
      want.push_back(sum * x[row * stride + 2 * channels + c]);
    }
  }
  expect_close(out.data(), want, 1e-5, "short_conv");
  Floats again(out.size());
  const RecurrentMixer mixer{call, 0, channels, 2 * channels};
  recurrent_mixer(isa, {mixer, x.data(), stride, 8, call.states, call.sequences, again.data()});
  expect(again == out, "a mixer of a convolution");
}

void check_recurrence(const Isa& isa, bool is_delta, int64_t key_dim, int64_t value_dim, bool takes_turns = false) {
  constexpr int64_t kHeads = 4, kKeyHeads = 2;
  const TwoSequences two;
  const int64_t size = kKeyHeads * key_dim, stride = 2 * size + kHeads * value_dim;
  const Floats x = random_floats(8 * stride), gates = random_floats(8 * 2 * kHeads);
  const Floats bias = random_floats(kHeads), log_decay = random_floats(kHeads), skip = random_floats(kHeads);
  const int64_t of_state = kHeads * key_dim * value_dim;
  Floats states(3 * of_state), out(8 * kHeads * value_dim);
  RecurrenceCall call{};
  call.queries = x.data();
  call.keys = x.data() + size;
  call.values = x.data() + 2 * size;
  call.row_stride = stride;
  call.steps = gates.data();
  call.rates = is_delta ? gates.data() + kHeads : nullptr;
  call.gate_stride = 2 * kHeads;
  call.step_bias = bias.data();
  call.log_decay = log_decay.data();
  call.skip = is_delta ? nullptr : skip.data();
  call.most_step = 10;
  call.num_heads = kHeads;
  call.num_key_heads = kKeyHeads;
  call.key_dim = key_dim;
  call.value_dim = value_dim;
  call.num_tokens = 8;
  call.is_delta = is_delta;
  call.takes_turns = takes_turns;
  call.norm_eps = is_delta ? 1e-6f : -1;
  call.query_scale = 0.5f;
  call.states = {states.data(), of_state, 0};
  call.sequences = two.call();
  call.out = out.data();
  recurrence(isa, call);
  std::vector<double> want(out.size());
  for (int64_t row = 0; row < 8; ++row) {
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<double> state(key_dim * value_dim);
      for (const int64_t token : TwoSequences::history(row)) {
        const float* const values = call.values + token * stride + head * value_dim;
        const auto scaled = [&](const float* from, double scale) {
          std::vector<double> found(from, from + key_dim);
          double squares = 0;
          for (const double it : found) squares += it * it;
          for (double& it : found) it *= is_delta ? scale / std::sqrt(squares + 1e-6) : scale;
          return found;
        };
        const int64_t of_key = token * stride + (takes_turns ? head % kKeyHeads : head / 2) * key_dim;
        const std::vector<double> query = scaled(call.queries + of_key, 0.5), key = scaled(call.keys + of_key, 1);
        const double step = std::log1p(std::exp(static_cast<double>(gates[token * 2 * kHeads + head]) + bias[head]));
        const double rate =
            is_delta ? 1 / (1 + std::exp(-static_cast<double>(gates[token * 2 * kHeads + kHeads + head]))) : step;
        const double decay = std::exp(-std::exp(static_cast<double>(log_decay[head])) * step);
        for (int64_t v = 0; v < value_dim; ++v) {
          double remembered = 0, sum = 0;
          for (int64_t k = 0; k < key_dim; ++k) remembered += (state[k * value_dim + v] *= decay) * key[k];
          const double added = rate * (values[v] - (is_delta ? remembered : 0));
          for (int64_t k = 0; k < key_dim; ++k) sum += (state[k * value_dim + v] += added * key[k]) * query[k];
          want[(row * kHeads + head) * value_dim + v] = sum + (is_delta ? 0 : values[v] * skip[head]);
        }
      }
    }
  }
  expect_close(out.data(), want, 1e-5, "recurrence");
}

// A mixer is its operations one after another: a row of gates, the convolution to values, keys and queries, then steps.
void check_mixer(const Isa& isa) {
  constexpr int64_t kHeads = 4, kKeyDim = 7, kValueDim = 18, kTaps = 3, kValues = kHeads * kValueDim;
  constexpr int64_t kChannels = kValues + 2 * kKeyDim, kRow = kValues + kChannels + kHeads;
  const TwoSequences two;
  const Floats x = random_floats(8 * kRow), taps = random_floats(kChannels * kTaps), bias = random_floats(kChannels);
  const Floats of_heads = random_floats(3 * kHeads), norm = random_floats(kValues);
  const int64_t of_conv = (kTaps - 1) * kChannels, of_state = of_conv + kHeads * kKeyDim * kValueDim;
  Floats states(3 * of_state), convolved(8 * kChannels), want(8 * kValues), got(8 * kValues);
  RecurrentMixer mixer{};
  ShortConvCall& conv = mixer.conv;
  conv.weight = taps.data(), conv.bias = bias.data(), conv.num_channels = kChannels, conv.num_taps = kTaps;
  conv.has_silu = true;
  RecurrenceCall& heads = mixer.recurrence;
  heads.step_bias = of_heads.data(), heads.log_decay = heads.step_bias + kHeads, heads.skip = heads.log_decay + kHeads;
  heads.most_step = 10, heads.num_heads = kHeads, heads.num_key_heads = 1, heads.key_dim = kKeyDim;
  heads.value_dim = kValueDim, heads.norm_eps = -1, heads.query_scale = 1;
  mixer.norm.weight = norm.data(), mixer.norm.num_weights = 2, mixer.norm.size = kValues / 2, mixer.norm.eps = 1e-6f;
  mixer.norm.is_gated_first = true;
  mixer.conv_at = kValues, mixer.in_gate_at = mixer.out_gate_at = mixer.rates_at = -1;
  mixer.keys_at = kValues, mixer.queries_at = kValues + kKeyDim, mixer.steps_at = kValues + kChannels;
  const StateMemory memory{states.data(), of_state, 0};
  recurrent_mixer(isa, {mixer, x.data(), kRow, 8, memory, two.call(), got.data()});

  ShortConvCall first = conv;
  first.x = x.data() + kValues, first.x_stride = kRow, first.states = memory, first.sequences = two.call();
  first.out = convolved.data();
  short_conv(isa, first);
  RecurrenceCall then = heads;
  then.values = convolved.data(), then.keys = then.values + kValues, then.queries = then.keys + kKeyDim;
  then.row_stride = kChannels, then.steps = x.data() + kValues + kChannels, then.gate_stride = kRow, then.num_tokens = 8;
  then.states = {states.data(), of_state, of_conv}, then.sequences = two.call(), then.out = want.data();
  recurrence(isa, then);
  gated_norm(isa, {want.data(), x.data(), 2, kRow, norm.data(), 2, 1e-6f, 16, kValues / 2, true, want.data()});
  expect(got == want, "a mixer of several operations");
}

void check_gates(const Isa& isa, int64_t size, bool is_gated_first) {
  constexpr int64_t kRows = 6;
  const Floats x = random_floats(kRows * size), gate = random_floats(3 * (2 * size + 1)), weight = random_floats(2 * size);
  Floats out(kRows * size), shares(kRows * size);
  gated_norm(isa, {x.data(), gate.data(), 2, 2 * size + 1, weight.data(), 2, 1e-6f, kRows, size, is_gated_first, out.data()});
  sigmoid_gate(isa, {x.data(), gate.data(), size, 3, size, shares.data()});
  std::vector<double> want, want_shares;
  for (int64_t row = 0; row < kRows; ++row) {
    const float* const g = gate.data() + row / 2 * (2 * size + 1) + row % 2 * size;
    const auto silu = [&](int64_t i) { return g[i] / (1 + std::exp(-static_cast<double>(g[i]))); };
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += std::pow(x[row * size + i] * (is_gated_first ? silu(i) : 1), 2);
    for (int64_t i = 0; i < size; ++i) {
      want.push_back(x[row * size + i] * silu(i) / std::sqrt(squares / static_cast<double>(size) + 1e-6) *
                     weight[row % 2 * size + i]);
      if (row < 3) want_shares.push_back(x[row * size + i] / (1 + std::exp(-static_cast<double>(gate[row * size + i]))));
    }
  }
  expect_close(out.data(), want, 1e-5, "gated_norm");
  expect_close(shares.data(), want_shares, 1e-5, "sigmoid_gate");
}

void check_recurrent(const Isa& isa) {
  for (const int64_t channels : {5, 16, 70}) {
    check_short_conv(isa, channels, 3);
    check_short_conv(isa, channels, 1 + channels % 8);
  }
  check_mixer(isa);
  for (const bool is_delta : {false, true}) {
    check_recurrence(isa, is_delta, 16, 32);
    check_recurrence(isa, is_delta, 7, 18);
    check_recurrence(isa, is_delta, 7, 18, true);
    check_gates(isa, 3, is_delta);
    check_gates(isa, 48, is_delta);
  }
}

void check_small_ops(const Isa& isa) {
  for (const int64_t rows : {0, 1, 3, 200}) {
    for (const int64_t size : {1, 15, 16, 70, 500}) {
      for (const bool subtracts_mean : {false, true}) check_norm(isa, rows, size, subtracts_mean);
      check_largest(isa, rows, size);
      check_draw(isa, rows, size, 0, 1);
      check_draw(isa, rows, size, std::min<int64_t>(size, 9), 1);
      check_draw(isa, rows, size, 0, 0.9);
      check_routes(isa, rows, size);
    }
    for (const int64_t dim : {8, 64}) {
      check_attention_input(isa, rows, dim, dim, false, false, false);
      check_attention_input(isa, rows, dim, dim / 2 + 2, true, false, true);
      check_attention_input(isa, rows, dim, dim / 2 + 2, false, true, false);
    }
  }
}

void check_moe_stage(const Isa& isa, Format format, int64_t tokens) {
  constexpr int64_t kExperts = 5, kTopK = 2, kHidden = 70, kWidth = 33, kAttended = 48;
  const Experts all(format, kExperts, kHidden, kWidth, Nonlinearity::kGelu, true, true);
  const Weight o_proj = random_weight(format, kHidden, kAttended),
               router = random_weight(Format::kF32, kExperts, kHidden);
  const Floats attended = random_floats(tokens * kAttended), hidden = random_floats(tokens * kHidden);
  const Floats norm = random_floats(kHidden);
  MoEStageCall call{};
  call.attended = attended.data(), call.hidden = hidden.data(), call.num_tokens = tokens;
  call.o_proj = o_proj.matrix, call.router = router.matrix, call.norm = {norm.data(), 1e-6f};
  call.layer = all.layer, call.routing.top_k = kTopK, call.routing.renormalize = true;
  const Floats router_bias = random_floats(kExperts);
  call.router_bias = router_bias.data();
  const Experts shared(format, 1, kHidden, 2 * kWidth, Nonlinearity::kSilu, true, false);
  const Weight shared_gate = random_weight(Format::kF32, 1, kHidden);
  call.shared = shared.layer, call.shared_gate = shared_gate.matrix;
  Floats got(tokens * kHidden), want(tokens * kHidden), normed(tokens * kHidden), logits(tokens * kExperts);
  call.out = got.data();
  moe_stage(isa, call);

  std::vector<int64_t> ids(tokens * kTopK);
  Floats weights(tokens * kTopK);
  linear(isa, {o_proj.matrix, attended.data(), tokens, kAttended, nullptr, hidden.data(), want.data()});
  normalise(isa, {want.data(), {norm.data(), 1e-6f}, tokens, kHidden, normed.data()});
  linear(isa, {router.matrix, normed.data(), tokens, kHidden, router_bias.data(), nullptr, logits.data()});
  route(isa, {call.routing, logits.data(), tokens, kExperts, ids.data(), weights.data()});
  Floats gates(tokens);
  linear(isa, {shared_gate.matrix, normed.data(), tokens, kHidden, nullptr, nullptr, gates.data()});
  Routing sigmoid;
  sigmoid.score = ScoreFunction::kSigmoid;
  std::vector<int64_t> zeros(tokens);
  Floats shared_weights(tokens);
  route(isa, {sigmoid, gates.data(), tokens, 1, zeros.data(), shared_weights.data()});
  for (int64_t token = 0; token < tokens; ++token) expect(zeros[token] == 0, "the shared expert's number");
  experts(isa, {shared.layer, normed.data(), tokens, 1, zeros.data(), shared_weights.data(), want.data(), want.data()});
  const Floats residual = want;
  experts(isa, {all.layer, normed.data(), tokens, kTopK, ids.data(), weights.data(), residual.data(), want.data()});
  expect(got == want, "a stage of several operations");
}

// The same where the shared expert and the chosen ones have weights and norms of their own, and the sum, too; scaled.
void check_normed_experts(const Isa& isa, Format format, int64_t tokens) {
  constexpr int64_t kExperts = 5, kTopK = 2, kHidden = 70, kWidth = 33, kAttended = 48;
  const Experts all(format, kExperts, kHidden, kWidth, Nonlinearity::kGelu, true, false);
  const Experts shared(format, 1, kHidden, 2 * kWidth, Nonlinearity::kGelu, true, false);
  const Weight o_proj = random_weight(format, kHidden, kAttended),
               router = random_weight(Format::kF32, kExperts, kHidden);
  const Floats attended = random_floats(tokens * kAttended), hidden = random_floats(tokens * kHidden);
  std::vector<Floats> weights;
  for (int i = 0; i < 8; ++i) weights.push_back(random_floats(kHidden));
  const auto norm = [&](int i) { return Norm{weights[i].data(), 1e-6f}; };
  const Floats scale = random_floats(1), expert_scales = random_floats(kExperts);
  MoEStageCall call{};
  call.attended = attended.data(), call.hidden = hidden.data(), call.num_tokens = tokens;
  call.o_proj = o_proj.matrix, call.router = router.matrix, call.layer = all.layer, call.shared = shared.layer;
  call.routing.top_k = kTopK, call.routing.expert_scales = expert_scales.data();
  call.norm = norm(0), call.attention_norm = norm(1), call.experts_norm = norm(2), call.out_scale = scale.data();
  call.normed_experts = {weights[3].data(), weights[4].data(), weights[5].data(), 0.3f, norm(6), norm(7)};
  Floats got(tokens * kHidden);
  call.out = got.data();
  moe_stage(isa, call);

  const auto normed = [&](const Floats& x, int i) {
    Floats out(x.size());
    normalise(isa, {x.data(), norm(i), tokens, kHidden, out.data()});
    return out;
  };
  const auto plus = [](Floats x, const Floats& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
    return x;
  };
  const auto weighted = [&](Floats x, int weight, float factor) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * factor * weights[weight][i % kHidden];
    return x;
  };
  Floats projected(tokens * kHidden), logits(tokens * kExperts), of_shared(tokens * kHidden), of_chosen(tokens * kHidden);
  linear(isa, {o_proj.matrix, attended.data(), tokens, kAttended, nullptr, nullptr, projected.data()});
  const Floats before = plus(normed(projected, 1), hidden), given = normed(before, 0);
  const Floats to_router = weighted(given, 3, 0.3f), to_shared = weighted(given, 4, 1), to_chosen = weighted(given, 5, 1);
  linear(isa, {router.matrix, to_router.data(), tokens, kHidden, nullptr, nullptr, logits.data()});
  std::vector<int64_t> ids(tokens * kTopK), zeros(tokens);
  Floats shares(tokens * kTopK);
  const Floats ones(tokens, 1.0f);
  route(isa, {call.routing, logits.data(), tokens, kExperts, ids.data(), shares.data()});
  experts(isa, {shared.layer, to_shared.data(), tokens, 1, zeros.data(), ones.data(), nullptr, of_shared.data()});
  experts(isa, {all.layer, to_chosen.data(), tokens, kTopK, ids.data(), shares.data(), nullptr, of_chosen.data()});
  Floats want = plus(before, normed(plus(normed(of_shared, 6), normed(of_chosen, 7)), 2));
  for (float& it : want) it *= scale[0];
  expect(got == want, "a stage of experts with norms of their own");
}

void check_moe_stage(const Isa& isa) {
  for (const Format format : kFormats) {
    for (const int64_t tokens : {0, 1, 9}) {
      check_layer_input(isa, format, tokens);
      check_moe_stage(isa, format, tokens);
      check_normed_experts(isa, format, tokens);
    }
  }
}

// Layers whose experts have slots, run in one go and with a stop at each, whose experts are then computed here. The second
// one is a short convolution, and the third attends to values in another order, gated.
void check_decoder(const Isa& isa, Format format, int64_t tokens) {
  constexpr int64_t kLayers = 3, kExperts = 5, kTopK = 2, kHidden = 70, kWidth = 33, kDim = 16, kBlock = 16;
  std::vector<std::unique_ptr<Experts>> all;
  std::vector<Weight> in_projs, o_projs, routers;
  const Floats norm = random_floats(kHidden), taps = random_floats(2 * kDim * 3);
  std::vector<std::vector<int32_t>> slots(kLayers);
  for (int64_t i = 0; i < kLayers; ++i) {
    all.push_back(std::make_unique<Experts>(format, kExperts, kHidden, kWidth, Nonlinearity::kSilu, true, false));
    in_projs.push_back(random_weight(format, (i == 2 ? 6 : 4) * kDim, kHidden));
    o_projs.push_back(random_weight(format, kHidden, 2 * kDim));
    routers.push_back(random_weight(Format::kF32, kExperts, kHidden));
    for (int32_t e = 0; e < kExperts; ++e) slots[i].push_back(e);
  }
  const Experts shared(format, 1, kHidden, kWidth, Nonlinearity::kSilu, true, false);
  std::vector<DecoderLayer> layers(kLayers);
  for (int64_t i = 0; i < kLayers; ++i) {
    DecoderLayer& layer = layers[i];
    layer.in_proj = {in_projs[i].matrix}, layer.input_norm = {norm.data(), 1e-6f}, layer.attention.num_heads = 2;
    layer.attention.rotary = i - 1;  // the first is not rotated
    layer.stage.o_proj = o_projs[i].matrix, layer.stage.router = routers[i].matrix, layer.stage.layer = all[i]->layer;
    layer.stage.shared = i == 1 ? ExpertLayer{} : shared.layer;
    layer.stage.routing.top_k = kTopK, layer.stage.routing.renormalize = true, layer.stage.norm = layer.input_norm;
  }
  ShortConvCall& conv = layers[1].recurrent.conv;
  conv.weight = taps.data(), conv.num_channels = 2 * kDim, conv.num_taps = 3;
  layers[1].recurrent.conv_at = 2 * kDim, layers[1].recurrent.out_gate_at = -1;
  layers[2].order = {{2 * kDim, 4 * kDim}, {0, 2 * kDim}}, layers[2].attention.is_gated = true;
  const int64_t num_blocks = tokens / kBlock + 1;
  const Cache cache(Format::kF32, num_blocks, 1, kBlock, kDim);
  std::vector<const DecoderLayer*> layer_list;
  for (const DecoderLayer& layer : layers) layer_list.push_back(&layer);
  const KVCache* const caches[] = {&cache.cache, nullptr, &cache.cache};  // one for all: a layer writes before it reads
  Floats state(2 * 2 * kDim);
  float* const states[] = {nullptr, state.data(), nullptr};
  const Floats cos = random_floats(tokens * kDim), sin = random_floats(tokens * kDim),
               x = random_floats(tokens * kHidden);
  const RotaryTable rotary[] = {{cos.data(), sin.data(), kDim}, {sin.data(), cos.data(), kDim / 2}};
  const std::vector<int64_t> places = in_order(tokens);
  std::vector<int32_t> blocks(num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) blocks[i] = static_cast<int32_t>(i);
  const int32_t zero = 0, none = -1, count = static_cast<int32_t>(tokens);
  Floats hidden = x, normed(tokens * kHidden), weights(tokens * kTopK);
  std::vector<int64_t> ids(kLayers * tokens * kTopK);
  DecoderCall call{layer_list.data(),
                   caches,
                   kLayers,
                   0,
                   hidden.data(),
                   tokens,
                   rotary,
                   places.data(),
                   Sequences{1, &zero, &zero, &count, &zero, blocks.data()},
                   nullptr,
                   states,
                   2 * 2 * kDim,
                   StateSequences{1, &zero, &count, &none, &zero, &zero, nullptr, nullptr}};
  expect(decoder(isa, call) == kLayers, "a pass through layers");
  const Floats want = hidden;

  for (int64_t i = 0; i < kLayers; ++i) layers[i].stage.layer.slots = slots[i].data();
  call.topk_ids = ids.data(), call.normed = normed.data(), call.topk_weights = weights.data();
  call.routers_ahead = 1;
  hidden = x;
  expect(decoder(isa, call) == kLayers && hidden == want, "a pass over slots");

  for (std::vector<int32_t>& row : slots) std::fill(row.begin(), row.end(), kAbsent);
  hidden = x;
  for (int64_t i = 0; i < kLayers; ++i) {
    call.first_layer = i;
    expect(decoder(isa, call) == i, "a stop where all experts are missing");
    experts(isa, {all[i]->layer, normed.data(), tokens, kTopK, ids.data() + i * tokens * kTopK, weights.data(),
                  hidden.data(), hidden.data()});
  }
  expect(hidden == want, "a pass that stops at every layer");

  for (int64_t i = 0; i < kLayers - 1; ++i) {
    for (int32_t e = 0; e < kExperts; ++e) slots[i][e] = e;
  }
  const std::vector<uint8_t> drafts(kLayers * kExperts, 1);
  call.first_layer = 0, call.drafts = drafts.data();
  hidden = x;
  expect(decoder(isa, call) == kLayers - 2, "a stop before what is drafted");
}

void check_decoder(const Isa& isa) {
  for (const Format format : kFormats) {
    for (const int64_t tokens : {1, 9, 20}) check_decoder(isa, format, tokens);
  }
}

// ---- refused arguments ----

// A call that throws leaves locks and workspace free.
void check_refusal(const Isa& isa) {
  const Experts all(Format::kF32, 3, 16, 16, Nonlinearity::kSilu, true, false);
  const Floats x = random_floats(16);
  Floats out(16);
  for (const int64_t id : {int64_t{-1}, int64_t{3}, int64_t{1} << 40}) {
    const float weight = 1;
    bool is_refused = false;
    try {
      experts(isa, {all.layer, x.data(), 1, 1, &id, &weight, nullptr, out.data()});
    } catch (const std::out_of_range&) {
      is_refused = true;
    }
    expect(is_refused, "an expert that is not there");
    check_experts(isa, Format::kF32, all, {2}, 2);
  }
  bool is_refused = false;
  try {
    sample(isa, {nullptr, 1, int64_t{1} << 31, nullptr, 0, nullptr});
  } catch (const std::length_error&) {
    is_refused = true;
  }
  expect(is_refused, "a row of too many values");
}

// ---- threads ----

// Each thread has its share of a job's items, and takes items of others at the end. Each item is used once, and an
// announced next item comes later or never.
void check_sharing() {
  struct Items {
    std::vector<std::atomic<int>> uses;
    std::atomic<bool> is_right{true};
  };
  for (const int threads : {1, 2, 3, 8, 9, 20}) {
    set_num_threads(threads);
    for (const int64_t count : {0, 1, 2, 7, 8, 9, 100, 1001}) {
      Items items{std::vector<std::atomic<int>>(count)};
      const Job use_all = [](void* context, Team& team, int thread_idx) {
        Items& items = *static_cast<Items*>(context);
        const int64_t count = items.uses.size();
        for (int phase = 0; phase < Team::kPhases; ++phase) {
          team.for_each(phase, count, thread_idx, [&](int64_t item, int64_t next) {
            ++items.uses[item];
            if (next <= item || next > count) items.is_right = false;
          });
        }
      };
      run_on_pool(use_all, &items);
      const bool all_used = std::all_of(items.uses.begin(), items.uses.end(),
                                        [](const std::atomic<int>& uses) { return uses == Team::kPhases; });
      expect(all_used && items.is_right, "the sharing of items among " + std::to_string(threads) + " threads");
    }
  }
  set_num_threads(1);
}

void check_callers_at_the_same_time(const Isa& isa) {
  std::atomic<bool> is_over{false};
  std::thread resizer([&] {
    for (int i = 0; !is_over.load(); ++i) {
      set_num_threads(i % 4 + 1);
      std::this_thread::yield();
    }
  });
  const auto compute = [&](Format format) {
    std::mt19937 own(3);
    const int64_t rows = 5, inputs = 40, outputs = 70;
    Floats source(outputs * inputs), x(rows * inputs), first(rows * outputs), out(rows * outputs);
    for (Floats* values : {&source, &x}) {
      for (float& value : *values) value = std::normal_distribution<float>()(own);
    }
    const Weight weight(format, source, outputs, inputs, in_order(outputs));
    for (int i = 0; i < 200; ++i) {
      Floats& to = i == 0 ? first : out;
      linear(isa, {weight.matrix, x.data(), rows, inputs, nullptr, nullptr, to.data()});
      expect(i == 0 || out == first, "a product beside others");
    }
  };
  std::thread a(compute, Format::kF32), b(compute, Format::kINT8);
  for (int i = 0; i < 20; ++i) check_attention(isa, Format::kF32, 600, 8, 0, false);
  a.join();
  b.join();
  is_over.store(true);
  resizer.join();
}

void check_fork(const Isa& isa) {
  if (!kMayFork) return;
  set_num_threads(3);
  check_norm(isa, 200, 500, true);
  const pid_t child = fork();
  check_linear(isa, false);
  if (child == 0) {
    expect(num_threads() == 3, "the number of threads after a fork");
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork");
}

}  // namespace

// With the name of an instruction set, as in an emulator, only that set is checked. One number of threads suffices, as
// every set shares work alike. Nothing forks, because QEMU cannot fork with threads.
int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  std::printf("best here: %s\n", choose_isa("")->name);
  const Isa* const chosen = choose_isa(only.c_str());
  if (chosen == nullptr || (!only.empty() && only != chosen->name)) fail("there is no " + only + " here");
  check_packing();
  check_sharing();
  for (int i = 0; isa_name(i) != nullptr; ++i) {
    const std::string name = isa_name(i);
    const Isa& isa = *choose_isa(name.c_str());
    if (isa.name != name) {
      std::printf("%s: not on this processor\n", name.c_str());
      continue;
    }
    if (!only.empty() && only != name) continue;
    for (const int count : only.empty() ? std::vector<int>{1, 2, 5} : std::vector<int>{2}) {
      set_num_threads(count);
      check_linear(isa, false);
      check_linear(isa, true);
      check_linear_of_heads(isa);
      check_blocks(isa);
      check_norm_before_linear(isa);
      check_experts(isa);
      check_moe_stage(isa);
      check_decoder(isa);
      check_attention(isa);
      check_attention_of_nothing(isa);
      check_latent_attention(isa);
      check_small_ops(isa);
      check_recurrent(isa);
      check_refusal(isa);
    }
    std::printf("%s: right\n", name.c_str());
  }
  check_callers_at_the_same_time(*chosen);
  if (only.empty()) check_fork(*chosen);
  set_num_threads(1);
  std::printf("threads: right\n");
}

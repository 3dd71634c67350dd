// The face of the extension: addresses and sizes in, nothing out. Shapes and types are checked by the Python side
// (moeflow/kernels), which also keeps the memory alive. The GIL is released while kernels run.
//
// Operations take structs (ops.h) with fields that Python sets by name. A new argument is a new field there, a line in
// the binding, and a keyword in the Python call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "io/crc32.h"
#include "io/expert_fetcher.h"
#include "formats/formats.h"
#include "simd/isa.h"
#include "ops/kv_cache.h"
#include "formats/matrix.h"
#include "ops/norm.h"
#include "ops/ops.h"
#include "threads/device_flag.h"
#include "threads/pool.h"
#include "formats/quantize.h"
#include "ops/scratch.h"
#include "threads/shared_group.h"
#include "io/slab_reader.h"
#include "formats/source_types.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace moeflow {
namespace {

// Releases the GIL for as long as it lives. At the end of the program Python up to 3.13 ends a thread that asks for
// the GIL again by unwinding its stack, which functions that are noexcept turn into an abort of the process. Such a
// thread waits here instead, as later Pythons have it do.
class WithoutGIL {
 public:
  WithoutGIL() : state_(PyEval_SaveThread()) {}
  ~WithoutGIL() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) pause();
    }
  }
  WithoutGIL(const WithoutGIL&) = delete;
  WithoutGIL& operator=(const WithoutGIL&) = delete;

 private:
  PyThreadState* state_;
};

// Read while the GIL is released, so that another thread may choose anew at the same time.
std::atomic<const Isa*> current_isa{nullptr};

const Isa& isa() {
  if (current_isa.load() == nullptr) current_isa.store(choose_isa(""));
  return *current_isa.load();
}

const Isa& known_isa(const std::string& cap) {
  const Isa* chosen = choose_isa(cap.c_str());
  if (chosen == nullptr) throw std::invalid_argument("unknown instruction set: " + cap);
  return *chosen;
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// ---- structs by their fields ----

// How a value comes from Python: a pointer as an address, where 0 is null; enumerators as numbers; numbers and bound
// objects as they are.
template <typename T>
struct FromPython {
  using Held = std::conditional_t<std::is_class_v<T>, const T&, T>;
  using Argument = std::conditional_t<std::is_enum_v<T>, int, Held>;
  static Held convert(Argument value) { return static_cast<Held>(value); }
};
template <typename T>
struct FromPython<T*> {
  using Argument = uintptr_t;
  static T* convert(uintptr_t address) { return at<T>(address); }
};

// Some matrices, which are copied.
template <>
struct FromPython<std::vector<Matrix>> {
  using Argument = const std::vector<const Matrix*>&;
  static std::vector<Matrix> convert(const std::vector<const Matrix*>& values) {
    std::vector<Matrix> copies;
    for (const Matrix* value : values) copies.push_back(*value);
    return copies;
  }
};

// Memory of layers by its addresses, and ranges by first and count.
template <>
struct FromPython<std::vector<float*>> {
  using Argument = const std::vector<uintptr_t>&;
  static std::vector<float*> convert(const std::vector<uintptr_t>& addresses) {
    std::vector<float*> found;
    for (const uintptr_t address : addresses) found.push_back(at<float>(address));
    return found;
  }
};
template <>
struct FromPython<std::vector<ValueRange>> {
  using Argument = const std::vector<std::tuple<int64_t, int64_t>>&;
  static std::vector<ValueRange> convert(const std::vector<std::tuple<int64_t, int64_t>>& values) {
    std::vector<ValueRange> ranges;
    for (const auto& [first, count] : values) ranges.push_back({first, count});
    return ranges;
  }
};

// A field of a struct, or of a struct in it: pointers to members lead there. Without any it is the struct itself.
template <typename Struct, auto... kPath>
struct Field {
  using Value = std::remove_reference_t<decltype((std::declval<Struct&>().*....*kPath))>;
  using Argument = typename FromPython<Value>::Argument;
  static void set(Struct& to, Argument value) { (to.*....*kPath) = FromPython<Value>::convert(value); }
  auto argument() const { return nb::arg(name); }
  const char* name;
};

// The same, but left as it is where Python gives None.
template <typename Struct, auto kMember>
struct OptionalField {
  using Argument = const typename Field<Struct, kMember>::Value*;
  static void set(Struct& to, Argument value) {
    if (value != nullptr) to.*kMember = *value;
  }
  auto argument() const { return nb::arg(name).none(); }
  const char* name;
};

// A pointer to a bound object, which Python keeps alive, or None.
template <typename Struct, auto kMember>
struct PointerField {
  using Argument = typename Field<Struct, kMember>::Value;
  static void set(Struct& to, Argument value) { to.*kMember = value; }
  auto argument() const { return nb::arg(name).none(); }
  const char* name;
};

// Sequences whose count is set already, from the address of int32 [4 count + ..]: first tokens, starts, counts, table
// offsets, block tables.
template <typename Struct, auto... kPath>
struct SequencesField {
  using Argument = uintptr_t;
  static void set(Struct& to, uintptr_t address) {
    const int64_t n = (to.*....*kPath).count;
    const int32_t* const arrays = at<const int32_t>(address);
    (to.*....*kPath) = {n, arrays, arrays + n, arrays + 2 * n, arrays + 3 * n, arrays + 4 * n};
  }
  auto argument() const { return nb::arg(name); }
  const char* name;
};

// Likewise, of what keeps states, from the address of int32 [5 count + 2 saves]: first rows, counts, sources, targets,
// ends of saves; then of the saves counts and slots.
template <typename Struct, auto... kPath>
struct StateSequencesField {
  using Argument = uintptr_t;
  static void set(Struct& to, uintptr_t address) {
    const int64_t n = (to.*....*kPath).count;
    const int32_t* const arrays = at<const int32_t>(address);
    const int32_t* const saves = arrays + 5 * n;
    const int64_t num_saves = n == 0 ? 0 : arrays[5 * n - 1];
    (to.*....*kPath) = {n,     arrays, arrays + n, arrays + 2 * n, arrays + 3 * n, arrays + 4 * n,
                        saves, saves + num_saves};
  }
  auto argument() const { return nb::arg(name); }
  const char* name;
};

#define FIELD(Struct, member) \
  Field<Struct, &Struct::member> { #member }

// The fields of a struct's `norm`.
#define NORM_FIELDS(Struct)                                                                      \
  Field<Struct, &Struct::norm, &Norm::weight>{"norm"}, Field<Struct, &Struct::norm, &Norm::eps>{"eps"}, \
      Field<Struct, &Struct::norm, &Norm::subtracts_mean>{"subtracts_mean"},                     \
      Field<Struct, &Struct::norm, &Norm::bias> { "norm_bias" }

// Bind an operation as a function of some fields of its struct; the others keep their defaults, or are zero.
template <typename Call, typename... Fields>
void def_call(nb::module_& m, const char* name, void (*run)(const Isa&, const Call&), const Fields&... fields) {
  m.def(
      name,
      [run](typename Fields::Argument... values) {
        Call call{};
        (Fields::set(call, values), ...);
        WithoutGIL without_gil;
        run(isa(), call);
      },
      fields.argument()...);
}

// Let Python make a struct from some of its fields, and keep it.
template <typename Struct, typename... Fields>
void def_init(nb::class_<Struct>& bound, const Fields&... fields) {
  bound.def(
      "__init__",
      [](Struct* self, typename Fields::Argument... values) {
        new (self) Struct{};
        (Fields::set(*self, values), ...);
      },
      fields.argument()...);
}

// ---- weights and caches: where they lie and how they are to be read; the memory belongs to Python ----

Format known_format(const std::string& name) {
#define MOEFLOW_ROW(NAME) \
  if (name == NAME::kName) return Format::k##NAME;
  MOEFLOW_FORMATS(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  throw std::invalid_argument("unknown weight format: " + name);
}

SourceType known_source(const std::string& name) {
#define MOEFLOW_ROW(NAME) \
  if (name == source::NAME::kName) return SourceType::k##NAME;
  MOEFLOW_SOURCE_TYPES(MOEFLOW_ROW)
#undef MOEFLOW_ROW
  throw std::invalid_argument("unknown type of weights in a file: " + name);
}

void check_cols(Format format, const std::string& name, int64_t cols) {
  const int64_t multiple = column_multiple(format);
  if (cols % multiple == 0) return;
  throw std::invalid_argument(name + " weights have columns in multiples of " + std::to_string(multiple) + ", not " +
                              std::to_string(cols));
}

Matrix make_matrix(const std::string& format, int64_t rows, int64_t cols, uintptr_t data, bool is_wide) {
  if (data % 64 != 0) throw std::invalid_argument("packed weights must be aligned to 64 bytes");
  const Format known = known_format(format);
  check_cols(known, format, cols);
  return Matrix{known, rows, cols, at<const uint8_t>(data), is_wide};
}

// The experts of a layer, and their matrices, which it points to.
struct PackedExperts : ExpertLayer {
  std::vector<Matrix> up_matrices, down_matrices;
};

void make_experts(PackedExperts* self, const std::string& up_format, const std::string& down_format, int64_t hidden,
                  int64_t width, const std::vector<uintptr_t>& up, const std::vector<uintptr_t>& down, int function, bool is_gated,
                  float alpha, float limit, const ExpertBiases* biases, bool is_wide) {
  const size_t count = std::max(up.size(), down.size());  // one may be empty, for half of the layer
  if (count == 0 || (!up.empty() && !down.empty() && up.size() != down.size())) {
    throw std::invalid_argument("every expert has up and down");
  }
  PackedExperts experts{};
  experts.num_experts = static_cast<int64_t>(count);
  experts.hidden = hidden;
  experts.width = width;
  experts.function = static_cast<Nonlinearity>(function);
  experts.is_gated = is_gated;
  if (experts.function == Nonlinearity::kClampedSwiglu && !is_gated) {
    throw std::invalid_argument("a clamped SwiGLU has gates");
  }
  experts.alpha = alpha;
  experts.limit = limit;
  if (biases != nullptr) experts.biases = *biases;
  for (uintptr_t data : up) {
    experts.up_matrices.push_back(make_matrix(up_format, experts.num_up_rows(), hidden, data, is_wide));
  }
  for (uintptr_t data : down) experts.down_matrices.push_back(make_matrix(down_format, hidden, width, data, is_wide));
  new (self) PackedExperts(std::move(experts));
  self->up = self->up_matrices.data();
  self->down = self->down_matrices.data();
}

// The experts of a layer that has `num_experts`, those of them that have slots being in memory; biases are of all.
ExpertLayer in_slots(const ExpertLayer& packed, uintptr_t slots, int64_t num_experts, const ExpertBiases* biases) {
  ExpertLayer layer = packed;
  layer.num_experts = num_experts;
  layer.biases = biases == nullptr ? ExpertBiases{} : *biases;
  layer.slots = at<const int32_t>(slots);
  return layer;
}

KVCache make_kv_cache(const std::string& format, uintptr_t data, int64_t num_blocks, int64_t num_heads,
                      int64_t block_size, int64_t head_dim, int64_t latent_dim) {
  if (data % 64 != 0) throw std::invalid_argument("a KV cache must be aligned to 64 bytes");
  return KVCache{known_format(format), at<uint8_t>(data), num_blocks, num_heads, block_size, head_dim, latent_dim};
}

// `rows` may be null: the first ones.
void check_rows(const Matrix& matrix, const int64_t* rows, int64_t num_rows) {
  if (rows == nullptr && num_rows > matrix.rows) throw std::out_of_range("a packed matrix has fewer rows");
  for (int64_t i = 0; rows != nullptr && i < num_rows; ++i) {
    if (rows[i] < 0 || rows[i] >= matrix.rows) {
      throw std::out_of_range("a packed matrix has no row " + std::to_string(rows[i]));
    }
  }
}

int64_t bytes_of_row(const std::string& type, int64_t cols) {
  return with_source_type(known_source(type), [&](auto it) {
    if (cols % it.kGroup == 0) return cols / it.kGroup * it.kBytes;
    throw std::invalid_argument("rows of " + std::to_string(cols) + " values are no whole " + type + " blocks");
  });
}

void run_pack_rows(const Matrix& weight, const std::string& type, uintptr_t source, uintptr_t rows, int64_t num_rows) {
  const SourceType source_type = known_source(type);
  WithoutGIL without_gil;
  check_rows(weight, at<const int64_t>(rows), num_rows);
  pack_rows(weight.format, source_type, at<const void>(source), weight.cols, at<const int64_t>(rows), num_rows,
            const_cast<uint8_t*>(weight.data));
}

void run_quantize_rows(const std::string& to, const std::string& from, uintptr_t source, int64_t num_rows, int64_t cols,
                       uintptr_t importance, uintptr_t out) {
  const SourceType blocks = known_source(to), values = known_source(from);
  bytes_of_row(to, cols);  // of whole blocks
  bytes_of_row(from, cols);
  WithoutGIL without_gil;
  quantize_rows(blocks, values, at<const void>(source), num_rows, cols, at<const float>(importance), at<uint8_t>(out));
}

void run_unpack_rows(const Matrix& weight, uintptr_t rows, int64_t num_rows, uintptr_t out) {
  WithoutGIL without_gil;
  check_rows(weight, at<const int64_t>(rows), num_rows);
  unpack_rows(weight, at<const int64_t>(rows), num_rows, at<float>(out));
}

void run_copy_rows(const Matrix& from, uintptr_t rows, const Matrix& to) {
  if (from.format != to.format || from.cols != to.cols) throw std::invalid_argument("rows of another kind");
  WithoutGIL without_gil;
  check_rows(from, at<const int64_t>(rows), to.rows);
  copy_rows(from, at<const int64_t>(rows), to.rows, const_cast<uint8_t*>(to.data));
}

// Where the memory of an object with Python's buffer protocol begins: NumPy's own ways of saying so take longer.
uintptr_t address_of(nb::handle object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_STRIDES) != 0) nb::raise_python_error();
  const uintptr_t found = reinterpret_cast<uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return found;
}

bool run_wait_for_flag(uintptr_t flag, double seconds) {
  WithoutGIL without_gil;
  return wait_for_flag(*at<const std::atomic<int64_t>>(flag), seconds);
}

void bind_memory(nb::module_& m) {
  m.def("wait_for_flag", &run_wait_for_flag, "flag"_a, "seconds"_a);
  m.def("address_of", &address_of, "object"_a);
  m.def("row_bytes", &bytes_of_row);
  m.def("matrix_bytes", [](const std::string& format, int64_t rows, int64_t cols) {
    const Format known = known_format(format);
    check_cols(known, format, cols);
    return matrix_bytes(known, rows, cols);
  });
  nb::class_<Matrix>(m, "PackedMatrix")
      .def(
          "__init__",
          [](Matrix* self, const std::string& format, int64_t rows, int64_t cols, uintptr_t data, bool is_wide) {
            new (self) Matrix(make_matrix(format, rows, cols, data, is_wide));
          },
          "format"_a, "rows"_a, "cols"_a, "data"_a, "is_wide"_a);
  nb::class_<ExpertBiases> biases(m, "ExpertBiases");
  def_init(biases, FIELD(ExpertBiases, gate), FIELD(ExpertBiases, up), FIELD(ExpertBiases, down),
           FIELD(ExpertBiases, up_stride), FIELD(ExpertBiases, down_stride));
  nb::class_<ExpertLayer>(m, "ExpertLayer")
      .def("in_slots", &in_slots, "slots"_a, "num_experts"_a, "biases"_a.none(), nb::keep_alive<0, 1>());
  nb::class_<PackedExperts, ExpertLayer>(m, "PackedExperts")
      .def("__init__", &make_experts, "up_format"_a, "down_format"_a, "hidden"_a, "width"_a, "up"_a, "down"_a, "function"_a, "is_gated"_a,
           "alpha"_a, "limit"_a, "biases"_a.none(), "is_wide"_a);
  nb::class_<KVCache>(m, "KVCache")
      .def(
          "__init__",
          [](KVCache* self, const std::string& format, uintptr_t data, int64_t num_blocks, int64_t num_heads,
             int64_t block_size, int64_t head_dim, int64_t latent_dim) {
            new (self) KVCache(make_kv_cache(format, data, num_blocks, num_heads, block_size, head_dim, latent_dim));
          },
          "format"_a, "data"_a, "num_blocks"_a, "num_heads"_a, "block_size"_a, "head_dim"_a, "latent_dim"_a);
  m.def("pack_rows", &run_pack_rows, "weight"_a, "type"_a, "source"_a, "rows"_a, "num_rows"_a);
  m.def("quantize_rows", &run_quantize_rows, "to"_a, "type"_a, "source"_a, "num_rows"_a, "cols"_a, "importance"_a, "out"_a);
  m.def("copy_rows", &run_copy_rows, "source"_a, "rows"_a, "out"_a);
  m.def("unpack_rows", &run_unpack_rows, "weight"_a, "rows"_a, "num_rows"_a, "out"_a);
}

// ---- operations ----

void bind_products(nb::module_& m) {
  def_call(m, "linear", &linear, FIELD(LinearCall, weight), FIELD(LinearCall, x), FIELD(LinearCall, num_rows),
           FIELD(LinearCall, x_stride), FIELD(LinearCall, bias), FIELD(LinearCall, residual), FIELD(LinearCall, out),
           NORM_FIELDS(LinearCall));
  def_call(m, "experts", &experts, FIELD(ExpertsCall, layer), FIELD(ExpertsCall, x), FIELD(ExpertsCall, num_tokens),
           FIELD(ExpertsCall, top_k), FIELD(ExpertsCall, topk_ids), FIELD(ExpertsCall, topk_weights),
           FIELD(ExpertsCall, residual), FIELD(ExpertsCall, out));
  def_call(m, "present_experts", &present_experts, FIELD(ExpertsCall, layer), FIELD(ExpertsCall, x),
           FIELD(ExpertsCall, num_tokens), FIELD(ExpertsCall, top_k), FIELD(ExpertsCall, topk_ids),
           FIELD(ExpertsCall, topk_weights), FIELD(ExpertsCall, out));
  def_call(m, "expert_pairs", &expert_pairs, FIELD(ExpertsCall, layer), FIELD(ExpertsCall, x),
           FIELD(ExpertsCall, num_tokens), FIELD(ExpertsCall, top_k), FIELD(ExpertsCall, topk_ids),
           FIELD(ExpertsCall, topk_weights), FIELD(ExpertsCall, out));
  def_call(m, "expert_units", &expert_units, FIELD(ExpertsCall, layer), FIELD(ExpertsCall, x),
           FIELD(ExpertsCall, num_tokens), FIELD(ExpertsCall, top_k), FIELD(ExpertsCall, topk_ids),
           FIELD(ExpertsCall, out));
  def_call(m, "expert_sums", &expert_sums, FIELD(ExpertsCall, layer), FIELD(ExpertsCall, x),
           FIELD(ExpertsCall, num_tokens), FIELD(ExpertsCall, top_k), FIELD(ExpertsCall, topk_ids),
           FIELD(ExpertsCall, topk_weights), FIELD(ExpertsCall, residual), FIELD(ExpertsCall, out));
  def_call(m, "add_pairs", &add_pairs, FIELD(AddPairsCall, pairs), FIELD(AddPairsCall, num_tokens),
           FIELD(AddPairsCall, top_k), FIELD(AddPairsCall, hidden), FIELD(AddPairsCall, topk_ids),
           FIELD(AddPairsCall, residual), FIELD(AddPairsCall, out));
}

void bind_attention(nb::module_& m) {
  using SequenceCount = Field<AttentionCall, &AttentionCall::sequences, &Sequences::count>;
  using SequenceArrays = SequencesField<AttentionCall, &AttentionCall::sequences>;
  def_call(m, "attention", &attention, FIELD(AttentionCall, cache), FIELD(AttentionCall, q),
           FIELD(AttentionCall, q_stride), FIELD(AttentionCall, num_heads), SequenceCount{"num_sequences"},
           SequenceArrays{"sequences"}, FIELD(AttentionCall, sliding_window), FIELD(AttentionCall, tree_masks),
           FIELD(AttentionCall, out), FIELD(AttentionCall, scale), FIELD(AttentionCall, lengths),
           FIELD(AttentionCall, bias), FIELD(AttentionCall, bias_reach), FIELD(AttentionCall, soft_cap),
           FIELD(AttentionCall, sinks));
  def_call(m, "attention_input", &attention_input, FIELD(AttentionInputCall, cache), FIELD(AttentionInputCall, qkv),
           FIELD(AttentionInputCall, num_tokens), FIELD(AttentionInputCall, num_heads),
           FIELD(AttentionInputCall, q_norm), FIELD(AttentionInputCall, k_norm),
           FIELD(AttentionInputCall, norm_all_heads), FIELD(AttentionInputCall, eps), FIELD(AttentionInputCall, clip),
           Field<AttentionInputCall, &AttentionInputCall::rotary, &RotaryTable::cos>{"cos"},
           Field<AttentionInputCall, &AttentionInputCall::rotary, &RotaryTable::sin>{"sin"},
           Field<AttentionInputCall, &AttentionInputCall::rotary, &RotaryTable::dim>{"rotary_dim"},
           FIELD(AttentionInputCall, slots), FIELD(AttentionInputCall, norms_last),
           FIELD(AttentionInputCall, is_interleaved), FIELD(AttentionInputCall, v_norm),
           FIELD(AttentionInputCall, has_keys));
  def_call<WriteKVCall>(
      m, "write_kv", [](const Isa&, const WriteKVCall& call) { write_kv(call); }, FIELD(WriteKVCall, cache),
      FIELD(WriteKVCall, num_tokens), FIELD(WriteKVCall, slots), FIELD(WriteKVCall, k), FIELD(WriteKVCall, k_stride),
      FIELD(WriteKVCall, v), FIELD(WriteKVCall, v_stride));
  def_call<MoveKVCall>(
      m, "move_kv", [](const Isa&, const MoveKVCall& call) { move_kv(call); }, FIELD(MoveKVCall, cache),
      FIELD(MoveKVCall, num_tokens), FIELD(MoveKVCall, from), FIELD(MoveKVCall, to));
  m.attr("kv_range_positions") = kRangePositions;
  m.attr("MAX_INTERLEAVED") = kMaxInterleaved;
}

// Row, temperature, top_k, top_p, min_p, number: as RowSampling has them.
using SamplingFields = std::tuple<int64_t, float, int64_t, double, float, double>;

std::vector<int64_t> run_sample(uintptr_t x, int64_t num_rows, int64_t size,
                                const std::vector<SamplingFields>& fields) {
  WithoutGIL without_gil;
  std::vector<RowSampling> samplings;
  for (const auto& [row, temperature, top_k, top_p, min_p, number] : fields) {
    samplings.push_back({row, temperature, top_k, top_p, min_p, number});
  }
  const int64_t count = static_cast<int64_t>(samplings.size());
  std::vector<int64_t> tokens(count);
  sample(isa(), SampleCall{at<const float>(x), num_rows, size, samplings.data(), count, tokens.data()});
  return tokens;
}

// What each call on states has: their memory, and the sequences of a pass.
#define STATE_FIELDS(Call)                                                                                  \
  Field<Call, &Call::states, &StateMemory::slots>{"slots"},                                                 \
      Field<Call, &Call::states, &StateMemory::slot_floats>{"slot_floats"},                                 \
      Field<Call, &Call::states, &StateMemory::offset>{"offset"},                                           \
      Field<Call, &Call::sequences, &StateSequences::count>{"num_sequences"}, StateSequencesField<Call, &Call::sequences> { \
    "sequences"                                                                                             \
  }

void bind_recurrent(nb::module_& m) {
  nb::class_<ShortConvCall> conv(m, "ShortConv");
  def_init(conv, FIELD(ShortConvCall, weight), FIELD(ShortConvCall, bias), FIELD(ShortConvCall, num_channels),
           FIELD(ShortConvCall, num_taps), FIELD(ShortConvCall, has_silu));
  def_call(m, "short_conv", &short_conv, Field<ShortConvCall>{"layer"}, FIELD(ShortConvCall, x),
           FIELD(ShortConvCall, in_gate), FIELD(ShortConvCall, out_gate), FIELD(ShortConvCall, x_stride),
           STATE_FIELDS(ShortConvCall), FIELD(ShortConvCall, out));
  nb::class_<RecurrenceCall> heads(m, "Recurrence");
  def_init(heads, FIELD(RecurrenceCall, step_bias), FIELD(RecurrenceCall, log_decay), FIELD(RecurrenceCall, skip),
           FIELD(RecurrenceCall, least_step), FIELD(RecurrenceCall, most_step), FIELD(RecurrenceCall, num_heads),
           FIELD(RecurrenceCall, num_key_heads), FIELD(RecurrenceCall, key_dim), FIELD(RecurrenceCall, value_dim),
           FIELD(RecurrenceCall, is_delta), FIELD(RecurrenceCall, takes_turns), FIELD(RecurrenceCall, norm_eps), FIELD(RecurrenceCall, query_scale));
  def_call(m, "recurrence", &recurrence, Field<RecurrenceCall>{"layer"}, FIELD(RecurrenceCall, queries),
           FIELD(RecurrenceCall, keys), FIELD(RecurrenceCall, values), FIELD(RecurrenceCall, row_stride),
           FIELD(RecurrenceCall, steps), FIELD(RecurrenceCall, rates), FIELD(RecurrenceCall, gate_stride),
           FIELD(RecurrenceCall, num_tokens), STATE_FIELDS(RecurrenceCall), FIELD(RecurrenceCall, out));
  nb::class_<GatedNormCall> norm(m, "GatedNorm");
  def_init(norm, FIELD(GatedNormCall, weight), FIELD(GatedNormCall, num_weights), FIELD(GatedNormCall, eps),
           FIELD(GatedNormCall, size), FIELD(GatedNormCall, is_gated_first));
  def_call(m, "gated_norm", &gated_norm, Field<GatedNormCall>{"layer"}, FIELD(GatedNormCall, x),
           FIELD(GatedNormCall, gate), FIELD(GatedNormCall, rows_per_gate), FIELD(GatedNormCall, gate_stride),
           FIELD(GatedNormCall, num_rows), FIELD(GatedNormCall, out));
  def_call(m, "sigmoid_gate", &sigmoid_gate, FIELD(SigmoidGateCall, x), FIELD(SigmoidGateCall, gate),
           FIELD(SigmoidGateCall, gate_stride), FIELD(SigmoidGateCall, num_rows), FIELD(SigmoidGateCall, size),
           FIELD(SigmoidGateCall, out));
  nb::class_<RecurrentMixer> mixer(m, "RecurrentMixer");
  def_init(mixer, FIELD(RecurrentMixer, conv), FIELD(RecurrentMixer, conv_at), FIELD(RecurrentMixer, in_gate_at),
           FIELD(RecurrentMixer, out_gate_at), OptionalField<RecurrentMixer, &RecurrentMixer::recurrence>{"recurrence"},
           FIELD(RecurrentMixer, queries_at), FIELD(RecurrentMixer, keys_at), FIELD(RecurrentMixer, values_at),
           FIELD(RecurrentMixer, steps_at), FIELD(RecurrentMixer, rates_at),
           OptionalField<RecurrentMixer, &RecurrentMixer::norm>{"norm"}, FIELD(RecurrentMixer, norm_gates_at));
  m.attr("max_taps") = kMaxTaps;
  m.attr("max_key_dim") = kMaxKeyDim;
}

void bind_row_ops(nb::module_& m) {
  def_call(m, "lstm", &lstm, FIELD(LstmCall, weights), FIELD(LstmCall, inputs), FIELD(LstmCall, num_steps),
           FIELD(LstmCall, num_texts), FIELD(LstmCall, state), FIELD(LstmCall, cell), FIELD(LstmCall, out));
  def_call(m, "normalise", &normalise, FIELD(NormCall, x), NORM_FIELDS(NormCall), FIELD(NormCall, num_rows),
           FIELD(NormCall, size), FIELD(NormCall, out));
  nb::class_<Routing> routing(m, "Routing");
  def_init(routing, FIELD(Routing, top_k), FIELD(Routing, renormalize), FIELD(Routing, score),
           FIELD(Routing, choice_bias), FIELD(Routing, num_groups), FIELD(Routing, num_chosen_groups),
           FIELD(Routing, group_score), FIELD(Routing, epsilon), FIELD(Routing, min_total), FIELD(Routing, scale),
           FIELD(Routing, expert_scales), FIELD(Routing, jitter));
  nb::class_<ExpertCapacity> capacity(m, "ExpertCapacity");
  def_init(capacity, FIELD(ExpertCapacity, factor), FIELD(ExpertCapacity, counts));
  m.attr("MAX_GROUPS") = kMaxGroups;
  def_call(m, "route", &route, FIELD(RouteCall, routing), FIELD(RouteCall, logits), FIELD(RouteCall, num_rows),
           FIELD(RouteCall, num_experts), FIELD(RouteCall, topk_ids), FIELD(RouteCall, topk_weights));
  def_call(m, "limit_choices", &limit_choices, FIELD(LimitCall, capacity), FIELD(LimitCall, topk_ids),
           FIELD(LimitCall, num_tokens), FIELD(LimitCall, top_k), FIELD(LimitCall, num_experts),
           FIELD(LimitCall, topk_weights));
  m.def("sample", &run_sample, "x"_a, "num_rows"_a, "size"_a, "samplings"_a);
}

// ---- whole layers ----

// What stays from pass to pass: the layers of a model, how the tables of its rotary positions are made, and the norm that
// follows the last layer.
struct DecoderModel {
  std::vector<const DecoderLayer*> layers;
  std::vector<Rotary> rotary;
  Norm out_norm;
};

// Likewise: where keys, values and states are.
struct DecoderMemory {
  std::vector<const KVCache*> caches;
  std::vector<float*> states;
  int64_t slot_floats;
};

// One pass: all that `DecoderCall` says but what changes from one stop to the next.
struct DecoderPass {
  const DecoderModel* model;
  const DecoderMemory* memory;
  const int64_t* positions;  // [num_tokens]
  DecoderCall call;
  std::vector<float> angles;  // of the tables
  std::vector<RotaryTable> rotary;
};

void make_tables(DecoderPass& pass) {
  const int64_t num_tokens = pass.call.num_tokens;
  int64_t size = 0;
  for (const Rotary& it : pass.model->rotary) size += 4 * it.num_pairs * num_tokens;
  pass.angles.resize(size);
  float* next = pass.angles.data();
  for (const Rotary& it : pass.model->rotary) {
    const int64_t dim = 2 * it.num_pairs;
    float *const cos = next, *const sin = next + dim * num_tokens;
    rotary_table(isa(), RotaryTableCall{it, pass.positions, num_tokens, cos, sin});
    pass.rotary.push_back({cos, sin, dim});
    next = sin + dim * num_tokens;
  }
}

int64_t run_pass(DecoderPass& pass, int64_t first_layer, uintptr_t hidden, int64_t routers_ahead, uintptr_t predicted,
                 ExpertFetcher* fetcher, uintptr_t times) {
  const auto& layers = pass.model->layers;
  if (layers.size() != pass.memory->caches.size() || layers.size() != pass.memory->states.size()) {
    throw std::invalid_argument("every layer has its own KV cache or states");
  }
  DecoderCall call = pass.call;
  call.layers = layers.data();
  call.caches = pass.memory->caches.data();
  call.states = pass.memory->states.data();
  call.slot_floats = pass.memory->slot_floats;
  call.num_layers = static_cast<int64_t>(layers.size());
  call.out_norm = pass.model->out_norm;
  call.first_layer = first_layer;
  call.hidden = at<float>(hidden);
  call.routers_ahead = routers_ahead;
  call.predicted = at<const uint8_t>(predicted);
  call.fetcher = fetcher;
  call.times = at<LayerTimes>(times);
  WithoutGIL without_gil;
  if (pass.rotary.empty()) make_tables(pass);
  call.rotary = pass.rotary.data();
  return decoder(isa(), call);
}

#define PASS_FIELD(member) \
  Field<DecoderPass, &DecoderPass::call, &DecoderCall::member> { #member }

// What Python gives of a call of latent attention; the projections are a reference in LatentAttentionCall.
void run_latent_attention(const LatentProjections& projections, const KVCache& cache, uintptr_t projected,
                          int64_t num_tokens, int64_t num_heads, const RotaryTable& rotary, uintptr_t slots,
                          int64_t num_sequences, uintptr_t sequences, int64_t sliding_window, uintptr_t tree_masks,
                          float scale, uintptr_t out) {
  struct Given {
    Sequences sequences;
  } given{};
  given.sequences.count = num_sequences;
  SequencesField<Given, &Given::sequences>::set(given, sequences);
  WithoutGIL without_gil;
  latent_attention(isa(), LatentAttentionCall{projections, cache, at<const float>(projected), num_tokens, num_heads,
                                              rotary, at<const int64_t>(slots), given.sequences, sliding_window,
                                              at<const uint64_t>(tree_masks), scale, at<float>(out)});
}

void bind_layers(nb::module_& m) {
  nb::class_<Norm> norm(m, "Norm");
  def_init(norm, FIELD(Norm, weight), FIELD(Norm, eps), FIELD(Norm, subtracts_mean), FIELD(Norm, bias));
  nb::class_<LatentProjections> latent(m, "LatentProjections");
  def_init(latent, OptionalField<LatentProjections, &LatentProjections::q_b>{"q_b"},
           OptionalField<LatentProjections, &LatentProjections::q_norm>{"q_norm"},
           FIELD(LatentProjections, latent_norm), FIELD(LatentProjections, k_b), FIELD(LatentProjections, v_b),
           FIELD(LatentProjections, nope_dim), FIELD(LatentProjections, value_dim),
           FIELD(LatentProjections, is_interleaved));
  m.def("latent_attention", &run_latent_attention, "projections"_a, "cache"_a, "projected"_a, "num_tokens"_a,
        "num_heads"_a, "rotary"_a, "slots"_a, "num_sequences"_a, "sequences"_a, "sliding_window"_a, "tree_masks"_a,
        "scale"_a, "out"_a);
  nb::class_<NormedExperts> norms(m, "NormedExperts");
  def_init(norms, FIELD(NormedExperts, router_weights), FIELD(NormedExperts, shared_weights),
           FIELD(NormedExperts, chosen_weights), FIELD(NormedExperts, router_scale), FIELD(NormedExperts, shared_norm),
           FIELD(NormedExperts, chosen_norm));
  nb::class_<MoEStageCall> stage(m, "MoEStage");
  def_init(stage, FIELD(MoEStageCall, o_proj), OptionalField<MoEStageCall, &MoEStageCall::router>{"router"},
           FIELD(MoEStageCall, layer), FIELD(MoEStageCall, routing), FIELD(MoEStageCall, o_bias),
           FIELD(MoEStageCall, norm), FIELD(MoEStageCall, router_bias),
           OptionalField<MoEStageCall, &MoEStageCall::shared>{"shared"},
           OptionalField<MoEStageCall, &MoEStageCall::shared_gate>{"shared_gate"},
           OptionalField<MoEStageCall, &MoEStageCall::attention_norm>{"attention_norm"},
           OptionalField<MoEStageCall, &MoEStageCall::experts_norm>{"experts_norm"},
           OptionalField<MoEStageCall, &MoEStageCall::normed_experts>{"normed_experts"}, FIELD(MoEStageCall, out_scale),
           OptionalField<MoEStageCall, &MoEStageCall::capacity>{"capacity"});
  def_call(m, "moe_stage", &moe_stage, Field<MoEStageCall>{"stage"}, FIELD(MoEStageCall, attended),
           FIELD(MoEStageCall, hidden), FIELD(MoEStageCall, num_tokens), FIELD(MoEStageCall, out));
  nb::class_<AttentionLayer> attention(m, "AttentionLayer");
  def_init(attention, FIELD(AttentionLayer, num_heads), FIELD(AttentionLayer, q_norm), FIELD(AttentionLayer, k_norm),
           FIELD(AttentionLayer, v_norm), FIELD(AttentionLayer, norm_all_heads), FIELD(AttentionLayer, clip), FIELD(AttentionLayer, sliding_window),
           FIELD(AttentionLayer, scale), FIELD(AttentionLayer, soft_cap), FIELD(AttentionLayer, sinks),
           FIELD(AttentionLayer, rotary), FIELD(AttentionLayer, norms_last), FIELD(AttentionLayer, is_interleaved),
           FIELD(AttentionLayer, is_gated), PointerField<AttentionLayer, &AttentionLayer::latent>{"latent"}, FIELD(AttentionLayer, has_keys));
  nb::class_<LayerInput> input(m, "LayerInput");
  def_init(input, FIELD(LayerInput, gate), FIELD(LayerInput, projection), FIELD(LayerInput, norm),
           FIELD(LayerInput, function), FIELD(LayerInput, scale));
  def_call(m, "layer_input", &layer_input, Field<LayerInputCall, &LayerInputCall::layer>{"layer"},
           FIELD(LayerInputCall, inputs), FIELD(LayerInputCall, inputs_stride), FIELD(LayerInputCall, num_tokens),
           FIELD(LayerInputCall, hidden));
  nb::class_<DecoderLayer> layer(m, "DecoderLayer");
  def_init(layer, FIELD(DecoderLayer, in_proj), FIELD(DecoderLayer, in_bias), FIELD(DecoderLayer, input_norm),
           FIELD(DecoderLayer, order), OptionalField<DecoderLayer, &DecoderLayer::attention>{"attention"},
           OptionalField<DecoderLayer, &DecoderLayer::recurrent>{"recurrent"}, FIELD(DecoderLayer, stage),
           OptionalField<DecoderLayer, &DecoderLayer::input>{"input"});
  nb::class_<RotaryTable> rotary(m, "RotaryTable");
  def_init(rotary, FIELD(RotaryTable, cos), FIELD(RotaryTable, sin), FIELD(RotaryTable, dim));
  using SequenceCount = Field<DecoderPass, &DecoderPass::call, &DecoderCall::sequences, &Sequences::count>;
  using SequenceArrays = SequencesField<DecoderPass, &DecoderPass::call, &DecoderCall::sequences>;
  using StateCount = Field<DecoderPass, &DecoderPass::call, &DecoderCall::state_sequences, &StateSequences::count>;
  using StateArrays = StateSequencesField<DecoderPass, &DecoderPass::call, &DecoderCall::state_sequences>;
  nb::class_<Rotary> frequencies(m, "Rotary");
  def_init(frequencies, FIELD(Rotary, frequencies), FIELD(Rotary, num_pairs), FIELD(Rotary, scale));
  def_call(m, "rotary_table", &rotary_table, FIELD(RotaryTableCall, rotary), FIELD(RotaryTableCall, positions),
           FIELD(RotaryTableCall, num_tokens), FIELD(RotaryTableCall, cos), FIELD(RotaryTableCall, sin));
  nb::class_<DecoderModel> model(m, "DecoderModel");
  def_init(model, FIELD(DecoderModel, layers), FIELD(DecoderModel, rotary),
           OptionalField<DecoderModel, &DecoderModel::out_norm>{"out_norm"});
  nb::class_<DecoderMemory> memory(m, "DecoderMemory");
  def_init(memory, FIELD(DecoderMemory, caches), FIELD(DecoderMemory, states), FIELD(DecoderMemory, slot_floats));
  nb::class_<DecoderPass> pass(m, "DecoderPass");
  def_init(pass, PointerField<DecoderPass, &DecoderPass::model>{"model"},
           PointerField<DecoderPass, &DecoderPass::memory>{"memory"}, PASS_FIELD(num_tokens),
           FIELD(DecoderPass, positions), PASS_FIELD(slots), SequenceCount{"num_sequences"}, SequenceArrays{"sequences"},
           StateCount{"num_states"}, StateArrays{"state_sequences"}, PASS_FIELD(tree_masks), PASS_FIELD(topk_ids),
           PASS_FIELD(normed), PASS_FIELD(topk_weights), PASS_FIELD(keeps_inputs), PASS_FIELD(layer_inputs),
           PASS_FIELD(inputs_stride), PASS_FIELD(out));
  pass.def("run", &run_pass, "first_layer"_a, "hidden"_a, "routers_ahead"_a, "predicted"_a,
           "fetcher"_a.none(), "times"_a);
  m.attr("ABSENT") = kAbsent;
  m.attr("LOADING") = kLoading;
}

// ---- experts from disk ----

// (slab, slot, whether it is right)
std::vector<std::tuple<int64_t, int64_t, bool>> take_ended(SlabReader& reader) {
  std::vector<std::tuple<int64_t, int64_t, bool>> found;
  if (!reader.has_ended()) return found;
  for (const EndedRead& read : reader.take_ended()) found.emplace_back(read.slab, read.slot, read.is_right);
  return found;
}

// (thread, slab, bytes, whether it was urgent, start and end in nanoseconds)
std::vector<std::tuple<int, int64_t, int64_t, bool, int64_t, int64_t>> take_spans(SlabReader& reader) {
  std::vector<std::tuple<int, int64_t, int64_t, bool, int64_t, int64_t>> found;
  for (const ReadSpan& span : reader.take_spans()) {
    found.emplace_back(span.thread, span.slab, span.num_bytes, span.is_urgent, span.start_ns, span.end_ns);
  }
  return found;
}

void bind_reads(nb::module_& m) {
  m.def(
      "crc32", [](uintptr_t bytes, int64_t count) { return crc32(at<const uint8_t>(bytes), count); }, "bytes"_a,
      "count"_a);
  m.attr("MIN_PIECE_BYTES") = kMinPieceBytes;
  nb::class_<SlabReader>(m, "SlabReader")
      .def(
          "__init__",
          [](SlabReader* self, int descriptor, bool is_direct, uintptr_t layer_starts, uintptr_t layer_bytes,
             int64_t num_layers, int64_t slabs_per_layer, uintptr_t checksums, uintptr_t memory, int64_t slot_bytes,
             int num_threads) {
            const SlabFile file{descriptor,
                                is_direct,
                                at<const int64_t>(layer_starts),
                                at<const int64_t>(layer_bytes),
                                num_layers,
                                slabs_per_layer,
                                at<const uint32_t>(checksums)};
            new (self) SlabReader(file, at<uint8_t>(memory), slot_bytes, num_threads);
          },
          "descriptor"_a, "is_direct"_a, "layer_starts"_a, "layer_bytes"_a, "num_layers"_a, "slabs_per_layer"_a,
          "checksums"_a, "memory"_a, "slot_bytes"_a, "num_threads"_a)
      .def("submit", &SlabReader::submit, "slabs_and_slots"_a, "is_urgent"_a, "waits_at_once"_a)
      .def("cancel", &SlabReader::cancel, "slab"_a)
      .def("take_ended", &take_ended)
      .def("keep_spans", &SlabReader::keep_spans, "keeps"_a)
      .def_prop_ro("keeps_spans", &SlabReader::keeps_spans)
      .def("take_spans", &take_spans)
      .def("wait", &SlabReader::wait, "seconds"_a, nb::call_guard<WithoutGIL>())
      .def("close", &SlabReader::close, nb::call_guard<WithoutGIL>())
      .def_prop_ro("is_closed", &SlabReader::is_closed);
  nb::class_<ExpertFetcher>(m, "ExpertFetcher")
      .def(
          "__init__",
          [](ExpertFetcher* self, SlabReader& reader, uintptr_t table, int64_t num_layers, int64_t num_experts) {
            new (self) ExpertFetcher(reader, at<int32_t>(table), num_layers, num_experts);
          },
          "reader"_a, "table"_a, "num_layers"_a, "num_experts"_a, nb::keep_alive<1, 2>())
      .def(
          "begin",
          [](ExpertFetcher& fetcher, std::vector<int32_t> free_slots, uintptr_t before, uintptr_t used,
             uintptr_t unused, uintptr_t may_leave, int64_t max_prefetches, int64_t max_needed) {
            const Worth worth{at<const double>(before), at<const double>(used), at<const double>(unused),
                              at<const MayLeave>(may_leave)};
            fetcher.begin(std::move(free_slots), before != 0 ? &worth : nullptr, max_prefetches, max_needed);
          },
          "free_slots"_a, "before"_a, "used"_a, "unused"_a, "may_leave"_a, "max_prefetches"_a, "max_needed"_a)
      // (entries: (event, expert, slot), late, misses, seconds of waiting, waits: (layer, start, end in nanoseconds))
      .def("end", [](ExpertFetcher& fetcher) {
        const FetchJournal journal = fetcher.end();
        std::vector<std::tuple<int, int, int>> entries;
        for (const FetchEntry& it : journal.entries) {
          entries.emplace_back(static_cast<int>(it.event), it.expert, it.slot);
        }
        std::vector<std::tuple<int64_t, int64_t, int64_t>> waits;
        for (const FetchWait& it : journal.waits) waits.emplace_back(it.layer, it.start_ns, it.end_ns);
        return std::make_tuple(std::move(entries), journal.num_late, journal.num_misses, journal.stall_s,
                               std::move(waits));
      });
}

// ---- ranks on one machine ----

#if defined(__linux__)
// Parts are (address, bytes).
void start_collective(SharedGroup& group, const std::string& label,
                      const std::vector<std::tuple<uintptr_t, int64_t>>& parts, bool is_for_all) {
  WithoutGIL without_gil;
  std::vector<Part> addressed;
  for (const auto& [address, bytes] : parts) addressed.push_back({at<const void>(address), bytes});
  group.start(label, std::move(addressed), is_for_all);
}

bool advance_collective(SharedGroup& group, const std::vector<uintptr_t>& outs) {
  WithoutGIL without_gil;
  if (static_cast<int>(outs.size()) != group.num_ranks()) throw std::invalid_argument("each rank has one output");
  std::vector<void*> addressed;
  for (const uintptr_t out : outs) addressed.push_back(at<void>(out));
  return group.advance(addressed);
}

void bind_ranks(nb::module_& m) {
  m.def("segment_bytes", &segment_bytes, "num_ranks"_a, "buffer_bytes"_a);
  m.def(
      "make_segment",
      [](uintptr_t memory, int num_ranks, int64_t buffer_bytes) {
        make_segment(at<void>(memory), num_ranks, buffer_bytes);
      },
      "memory"_a, "num_ranks"_a, "buffer_bytes"_a);
  nb::class_<SharedGroup> group(m, "SharedGroup");
  nb::enum_<SharedGroup::State>(group, "State")
      .value("WAITING", SharedGroup::State::kWaiting)
      .value("COMPLETE", SharedGroup::State::kComplete)
      .value("MISMATCH", SharedGroup::State::kMismatch)
      .value("ABORTED", SharedGroup::State::kAborted);
  group
      .def(
          "__init__",
          [](SharedGroup* self, uintptr_t memory, int rank) { new (self) SharedGroup(at<void>(memory), rank); },
          "memory"_a, "rank"_a)
      .def_prop_ro("num_ranks", &SharedGroup::num_ranks)
      .def("start", &start_collective, "label"_a, "parts"_a, "is_for_all"_a)
      .def("wait", &SharedGroup::wait, "seconds"_a, nb::call_guard<WithoutGIL>())
      .def("missing", &SharedGroup::missing)
      .def("label_of", &SharedGroup::label_of, "rank"_a)
      .def("incoming_bytes", &SharedGroup::incoming_bytes)
      .def("advance", &advance_collective, "outs"_a)
      .def("abort", &SharedGroup::abort, "reason"_a)
      .def("abort_reason", &SharedGroup::abort_reason);
}
#endif

}  // namespace
}  // namespace moeflow

NB_MODULE(_cpu, m) {
  using namespace moeflow;
  m.doc() = "CPU kernels of moeflow; use moeflow.kernels.cpu.extension, which checks what these do not.";
  nb::set_leak_warnings(false);  // a thread that still computes when the program ends keeps its memory
  m.def(
      "use_isa", [](const std::string& cap) { current_isa.store(&known_isa(cap)); }, "cap"_a,
      "Choose the best instruction set up to `cap`; empty: the best there is.");
  m.def("isa_names", [] {
    std::vector<std::string> names;
    for (int i = 0; isa_name(i) != nullptr; ++i) names.emplace_back(isa_name(i));
    return names;
  });
  m.def("best_isa", [](const std::string& cap) { return std::string(known_isa(cap).name); });
  m.def("isa_name", [] { return std::string(isa().name); });
  m.def("set_num_threads", &set_num_threads, "num_threads"_a, nb::call_guard<WithoutGIL>());
  m.def("num_threads", &num_threads);
  m.def("use_own_threads", &use_own_threads, "num_threads"_a, nb::call_guard<WithoutGIL>());
  m.def("kept_bytes", [] { return kept_bytes.load(); });
  bind_memory(m);
  bind_products(m);
  bind_attention(m);
  bind_recurrent(m);
  bind_row_ops(m);
  bind_layers(m);
  bind_reads(m);
#if defined(__linux__)
  bind_ranks(m);
#endif
}

// The face of the extension: addresses and sizes in, nothing out. Shapes and types are checked by the Python side
// (moeflow/kernels), which also keeps the memory alive. The GIL is released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "scratch.h"

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

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A packed matrix: where it lies and how it is to be read. The memory belongs to Python.
struct PackedMatrix {
  Matrix matrix;
};

// The experts of a layer, their matrices looked up once.
struct PackedExperts {
  std::vector<Matrix> up, down;
  ExpertLayer layer;
};

Matrix make_matrix(int format, int64_t rows, int64_t cols, uintptr_t data, bool is_wide) {
  if (data % 64 != 0) throw std::invalid_argument("packed weights must be aligned to 64 bytes");
  return Matrix{static_cast<Format>(format), rows, cols, at<const uint8_t>(data), is_wide};
}

void use_isa(const std::string& cap) {
  const Isa* chosen = choose_isa(cap.c_str());
  if (chosen == nullptr) throw std::invalid_argument("unknown instruction set: " + cap);
  current_isa.store(chosen);
}

void run_linear(const PackedMatrix& weight, uintptr_t x, int64_t num_rows, int64_t x_stride, uintptr_t bias,
                uintptr_t residual, uintptr_t out, uintptr_t norm, float eps) {
  WithoutGIL without_gil;
  linear(isa(), LinearCall{weight.matrix, at<const float>(x), num_rows, x_stride, at<const float>(bias),
                           at<const float>(residual), at<float>(out), at<const float>(norm), eps});
}

// The experts of a layer that has `num_experts`, those of them that have slots being in memory; or all, in order.
ExpertLayer in_slots(const PackedExperts& packed, uintptr_t slots, int64_t num_experts) {
  ExpertLayer layer = packed.layer;
  if (slots == 0) return layer;
  if (layer.up_bias != nullptr) throw std::invalid_argument("experts in slots have no biases");
  layer.num_experts = num_experts;
  layer.slots = at<const int32_t>(slots);
  return layer;
}

void run_experts(const PackedExperts& packed, uintptr_t x, int64_t num_tokens, int64_t top_k, uintptr_t topk_ids,
                 uintptr_t topk_weights, uintptr_t residual, uintptr_t out, uintptr_t slots, int64_t num_experts) {
  const ExpertLayer layer = in_slots(packed, slots, num_experts);
  WithoutGIL without_gil;
  experts(isa(), ExpertsCall{layer, at<const float>(x), num_tokens, top_k, at<const int64_t>(topk_ids),
                             at<const float>(topk_weights), at<const float>(residual), at<float>(out)});
}

void run_expert_pairs(const PackedExperts& packed, uintptr_t x, int64_t num_tokens, int64_t top_k, uintptr_t topk_ids,
                      uintptr_t topk_weights, uintptr_t out, uintptr_t slots, int64_t num_experts) {
  const ExpertLayer layer = in_slots(packed, slots, num_experts);
  WithoutGIL without_gil;
  expert_pairs(isa(), ExpertsCall{layer, at<const float>(x), num_tokens, top_k, at<const int64_t>(topk_ids),
                                  at<const float>(topk_weights), nullptr, at<float>(out)});
}

void run_add_pairs(uintptr_t pairs, int64_t num_tokens, int64_t top_k, int64_t hidden, uintptr_t topk_ids,
                   uintptr_t residual, uintptr_t out) {
  WithoutGIL without_gil;
  add_pairs(isa(), AddPairsCall{at<float>(pairs), num_tokens, top_k, hidden, at<const int64_t>(topk_ids),
                                at<const float>(residual), at<float>(out)});
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

void run_pack_rows(const PackedMatrix& weight, int type, uintptr_t source, uintptr_t rows, int64_t num_rows) {
  WithoutGIL without_gil;
  const Matrix& matrix = weight.matrix;
  check_rows(matrix, at<const int64_t>(rows), num_rows);
  pack_rows(matrix.format, static_cast<SourceType>(type), at<const void>(source), matrix.cols, at<const int64_t>(rows),
            num_rows, const_cast<uint8_t*>(matrix.data));
}

void run_unpack_rows(const PackedMatrix& weight, uintptr_t rows, int64_t num_rows, uintptr_t out) {
  WithoutGIL without_gil;
  check_rows(weight.matrix, at<const int64_t>(rows), num_rows);
  unpack_rows(weight.matrix, at<const int64_t>(rows), num_rows, at<float>(out));
}

// ---- attention ----

// One layer's cache. The memory belongs to Python.
struct BoundKVCache {
  KVCache cache;
};

void run_write_kv(const BoundKVCache& kv, int64_t num_tokens, uintptr_t slots, uintptr_t k, int64_t k_stride,
                  uintptr_t v, int64_t v_stride) {
  WithoutGIL without_gil;
  write_kv(WriteKVCall{kv.cache, num_tokens, at<const int64_t>(slots), at<const float>(k), at<const float>(v),
                       k_stride, v_stride});
}

// `sequences` is the address of int32 [4 n + ..]: first tokens, starts, counts, table offsets, block tables.
void run_attention(const BoundKVCache& kv, uintptr_t q, int64_t q_stride, int64_t num_heads, int64_t num_sequences,
                   uintptr_t sequences, int64_t sliding_window, uintptr_t tree_masks, uintptr_t out) {
  WithoutGIL without_gil;
  const int32_t* arrays = at<const int32_t>(sequences);
  const int64_t n = num_sequences;
  attention(isa(), AttentionCall{kv.cache, at<const float>(q), q_stride, num_heads, n, arrays, arrays + n,
                                 arrays + 2 * n, arrays + 3 * n, arrays + 4 * n, sliding_window,
                                 at<const uint64_t>(tree_masks), at<float>(out)});
}

// ---- small operations ----

void run_rms_norm(uintptr_t x, uintptr_t weight, float eps, int64_t num_rows, int64_t size, uintptr_t out) {
  WithoutGIL without_gil;
  rms_norm(isa(), RmsNormCall{at<const float>(x), at<const float>(weight), eps, num_rows, size, at<float>(out)});
}

void run_attention_input(const BoundKVCache& kv, uintptr_t qkv, int64_t num_tokens, int64_t num_heads, uintptr_t q_norm,
                         uintptr_t k_norm, bool norm_all_heads, float eps, float clip, uintptr_t cos, uintptr_t sin,
                         uintptr_t slots) {
  WithoutGIL without_gil;
  attention_input(isa(), AttentionInputCall{kv.cache, at<float>(qkv), num_tokens, num_heads, at<const float>(q_norm),
                                            at<const float>(k_norm), norm_all_heads, eps, clip, at<const float>(cos),
                                            at<const float>(sin), at<const int64_t>(slots)});
}

// ---- whole layers ----

const Matrix kNoMatrix{};

void run_moe_stage(const PackedMatrix& o_proj, const PackedMatrix* router, const PackedExperts& packed, int64_t top_k,
                   bool renormalize, uintptr_t o_bias, uintptr_t norm, float eps, uintptr_t attended, uintptr_t hidden,
                   int64_t num_tokens, uintptr_t out) {
  WithoutGIL without_gil;
  moe_stage(isa(), MoEStageCall{o_proj.matrix, router == nullptr ? kNoMatrix : router->matrix, packed.layer, top_k, renormalize,
                                at<const float>(o_bias), at<const float>(norm), eps, at<const float>(attended),
                                at<const float>(hidden), num_tokens, at<float>(out)});
}

// Keeps the objects that its matrices belong to alive through Python.
struct BoundLayer {
  DecoderLayer layer;
};

int64_t run_decoder(const std::vector<const BoundLayer*>& layers, const std::vector<const BoundKVCache*>& caches,
                    int64_t first_layer, uintptr_t hidden, int64_t num_tokens, uintptr_t cos, uintptr_t sin,
                    uintptr_t slots, int64_t num_sequences, uintptr_t sequences, uintptr_t tree_masks,
                    uintptr_t topk_ids, uintptr_t normed, uintptr_t topk_weights, bool asks_next_router,
                    uintptr_t guesses) {
  if (layers.size() != caches.size()) throw std::invalid_argument("every layer has its own KV cache");
  WithoutGIL without_gil;
  std::vector<const DecoderLayer*> layer_list;
  std::vector<const KVCache*> cache_list;
  for (const BoundLayer* bound : layers) layer_list.push_back(&bound->layer);
  for (const BoundKVCache* bound : caches) cache_list.push_back(&bound->cache);
  const int32_t* arrays = at<const int32_t>(sequences);
  const int64_t n = num_sequences;
  return decoder(
      isa(), DecoderCall{layer_list.data(), cache_list.data(), static_cast<int64_t>(layer_list.size()), first_layer,
                         at<float>(hidden), num_tokens, at<const float>(cos), at<const float>(sin),
                         at<const int64_t>(slots),
                         Sequences{n, arrays, arrays + n, arrays + 2 * n, arrays + 3 * n, arrays + 4 * n},
                         at<const uint64_t>(tree_masks), at<int64_t>(topk_ids), at<float>(normed),
                         at<float>(topk_weights), asks_next_router, at<const uint8_t>(guesses)});
}

void run_softmax_topk(uintptr_t logits, int64_t num_rows, int64_t num_experts, int64_t top_k, bool renormalize,
                      uintptr_t topk_ids, uintptr_t topk_weights) {
  WithoutGIL without_gil;
  softmax_topk(isa(), SoftmaxTopkCall{at<const float>(logits), num_rows, num_experts, top_k, renormalize,
                                      at<int64_t>(topk_ids), at<float>(topk_weights)});
}

void run_largest(uintptr_t x, int64_t num_rows, int64_t size, uintptr_t values, uintptr_t indices) {
  WithoutGIL without_gil;
  largest(isa(), LargestCall{at<const float>(x), num_rows, size, at<float>(values), at<int64_t>(indices)});
}

// Row, largest, temperature, top_k, top_p, min_p, number.
using DrawFields = std::tuple<int64_t, float, float, int64_t, double, float, double>;

std::vector<int64_t> run_draw(uintptr_t x, int64_t num_rows, int64_t size, const std::vector<DrawFields>& fields) {
  WithoutGIL without_gil;
  std::vector<Draw> draws;
  for (const auto& [row, largest, temperature, top_k, top_p, min_p, number] : fields) {
    draws.push_back({row, largest, temperature, top_k, top_p, min_p, number});
  }
  const int64_t count = static_cast<int64_t>(draws.size());
  std::vector<int64_t> tokens(count);
  draw(isa(), DrawCall{at<const float>(x), num_rows, size, draws.data(), count, tokens.data()});
  return tokens;
}

}  // namespace
}  // namespace moeflow

NB_MODULE(_cpu, m) {
  using namespace moeflow;
  m.doc() = "CPU kernels of moeflow; use moeflow.kernels.cpu.extension, which checks what these do not.";
  nb::set_leak_warnings(false);  // a thread that still computes when the program ends keeps what it uses
  m.def("use_isa", &use_isa, "cap"_a, "Choose the best instruction set up to `cap`; empty: the best there is.");
  m.def("best_isa", [](const std::string& cap) {
    const Isa* best = choose_isa(cap.c_str());
    if (best == nullptr) throw std::invalid_argument("unknown instruction set: " + cap);
    return std::string(best->name);
  });
  m.def("isa_name", [] { return std::string(isa().name); });
  m.def("set_num_threads", &set_num_threads, "num_threads"_a, nb::call_guard<WithoutGIL>());
  m.def("num_threads", &num_threads);
  m.def("kept_bytes", [] { return kept_bytes.load(); });
  m.def("matrix_bytes", [](int format, int64_t rows, int64_t cols) {
    return matrix_bytes(static_cast<Format>(format), rows, cols);
  });

  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def("__init__", [](PackedMatrix* self, int format, int64_t rows, int64_t cols, uintptr_t data, bool is_wide) {
        new (self) PackedMatrix{make_matrix(format, rows, cols, data, is_wide)};
      });
  nb::class_<PackedExperts>(m, "PackedExperts")
      .def("__init__", [](PackedExperts* self, int format, int64_t hidden, int64_t width,
                          const std::vector<uintptr_t>& up, const std::vector<uintptr_t>& down, int function,
                          bool is_gated, uintptr_t up_bias, uintptr_t down_bias, bool is_wide) {
        if (up.empty() || up.size() != down.size()) throw std::invalid_argument("every expert has up and down");
        PackedExperts experts;
        ExpertLayer& layer = experts.layer;
        layer = {nullptr, nullptr, static_cast<int64_t>(up.size()), hidden, width, static_cast<Nonlinearity>(function),
                 is_gated, at<const float>(up_bias), at<const float>(down_bias)};
        for (uintptr_t data : up) experts.up.push_back(make_matrix(format, layer.num_up_rows(), hidden, data, is_wide));
        for (uintptr_t data : down) experts.down.push_back(make_matrix(format, hidden, width, data, is_wide));
        layer.up = experts.up.data(), layer.down = experts.down.data();  // which stay where they are when moved
        new (self) PackedExperts(std::move(experts));
      });

  m.def("linear", &run_linear, "weight"_a, "x"_a, "num_rows"_a, "x_stride"_a, "bias"_a, "residual"_a, "out"_a,
        "norm"_a = 0, "eps"_a = 0.0f);
  m.def("experts", &run_experts, "experts"_a, "x"_a, "num_tokens"_a, "top_k"_a, "topk_ids"_a, "topk_weights"_a,
        "residual"_a, "out"_a, "slots"_a = 0, "num_experts"_a = 0);
  m.def("expert_pairs", &run_expert_pairs);
  m.def("add_pairs", &run_add_pairs);
  m.def("pack_rows", &run_pack_rows);
  m.def("unpack_rows", &run_unpack_rows);

  // ---- attention ----
  nb::class_<BoundKVCache>(m, "KVCache")
      .def("__init__", [](BoundKVCache* self, int format, uintptr_t data, int64_t num_blocks, int64_t num_heads,
                          int64_t block_size, int64_t head_dim) {
        if (data % 64 != 0) throw std::invalid_argument("a KV cache must be aligned to 64 bytes");
        new (self) BoundKVCache{
            KVCache{static_cast<Format>(format), at<uint8_t>(data), num_blocks, num_heads, block_size, head_dim}};
      });
  m.def("write_kv", &run_write_kv);
  m.def("attention", &run_attention);

  // ---- small operations ----
  m.def("rms_norm", &run_rms_norm);
  m.def("attention_input", &run_attention_input);
  m.def("softmax_topk", &run_softmax_topk);
  m.def("largest", &run_largest);
  m.def("draw", &run_draw);

  // ---- whole layers ----
  m.def("moe_stage", &run_moe_stage, "o_proj"_a, "router"_a.none(), "experts"_a, "top_k"_a, "renormalize"_a, "o_bias"_a,
        "norm"_a, "eps"_a, "attended"_a, "hidden"_a, "num_tokens"_a, "out"_a);
  nb::class_<BoundLayer>(m, "DecoderLayer")
      .def(
          "__init__",
          [](BoundLayer* self, const PackedMatrix& qkv, uintptr_t qkv_bias, uintptr_t input_norm, int64_t num_heads,
             uintptr_t q_norm, uintptr_t k_norm, bool norm_all_heads, float clip, int64_t sliding_window,
             const PackedMatrix& o_proj, uintptr_t o_bias, uintptr_t norm, float eps, const PackedMatrix* router,
             const PackedExperts& experts, uintptr_t slots, int64_t num_experts, int64_t top_k, bool renormalize) {
            const ExpertLayer layer = in_slots(experts, slots, num_experts);
            new (self) BoundLayer{
                DecoderLayer{qkv.matrix, at<const float>(qkv_bias), at<const float>(input_norm), eps, num_heads,
                             at<const float>(q_norm), at<const float>(k_norm), norm_all_heads, clip, sliding_window,
                             MoEStageCall{o_proj.matrix, router == nullptr ? kNoMatrix : router->matrix, layer,
                                          top_k, renormalize, at<const float>(o_bias), at<const float>(norm), eps,
                                          nullptr, nullptr, 0, nullptr}}};
          },
          "qkv"_a, "qkv_bias"_a, "input_norm"_a, "num_heads"_a, "q_norm"_a, "k_norm"_a, "norm_all_heads"_a, "clip"_a,
          "sliding_window"_a, "o_proj"_a, "o_bias"_a, "norm"_a, "eps"_a, "router"_a.none(), "experts"_a, "slots"_a,
          "num_experts"_a, "top_k"_a, "renormalize"_a);
  m.attr("ABSENT") = kAbsent;
  m.attr("LOADING") = kLoading;
  m.def("decoder", &run_decoder);
}

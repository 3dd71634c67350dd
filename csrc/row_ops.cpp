// What is done to each row by itself: normalisation, the router's choice, the maximum of the logits.
#include <limits>
#include <stdexcept>

#include "ops.h"
#include "rows.h"

namespace moeflow {

void normalise(const Isa& isa, const NormCall& call) {
  for_each_row(call.num_rows, call.size, [&](int64_t row) {
    normalise_row(isa, call.norm, call.x + row * call.size, call.size, call.out + row * call.size);
  });
}

void route(const Isa& isa, const RouteCall& call) {
  for_each_row(call.num_rows, 8 * call.num_experts, [&](int64_t row) {
    isa.route_row(call.routing, call.logits + row * call.num_experts, call.num_experts,
                  call.topk_ids + row * call.routing.top_k, call.topk_weights + row * call.routing.top_k);
  });
}

void argmax(const Isa& isa, const ArgmaxCall& call) {
  if (call.size > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("places in a row are counted in 32 bits");
  }
  for_each_row(call.num_rows, call.size, [&](int64_t row) {
    const Argmax found = isa.argmax_row(call.x + row * call.size, call.size);
    call.values[row] = found.value;
    call.indices[row] = found.index;
  });
}

}  // namespace moeflow

// Operations on single rows: normalization, rotary positions, the router's choice.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/ops.h"
#include "ops/rows.h"

namespace moeflow {

void normalise(const Isa& isa, const NormCall& call) {
  for_each_row(call.num_rows, call.size, [&](int64_t row) {
    normalise_row(isa, call.norm, call.x + row * call.size, call.size, call.out + row * call.size);
  });
}

void rotary_table(const Isa&, const RotaryTableCall& call) {
  const Rotary& rotary = call.rotary;
  const int64_t half = rotary.num_pairs;
  for_each_row(call.num_tokens, 64 * half, [&](int64_t token) {
    const float position = static_cast<float>(call.positions[token]);
    float *const cos = call.cos + token * 2 * half, *const sin = call.sin + token * 2 * half;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = position * rotary.frequencies[i];
      cos[i] = cos[half + i] = static_cast<float>(std::cos(angle) * rotary.scale);
      sin[half + i] = static_cast<float>(std::sin(angle) * rotary.scale);
      sin[i] = -sin[half + i];
    }
  });
}

void route(const Isa& isa, const RouteCall& call) {
  for_each_row(call.num_rows, 8 * call.num_experts, [&](int64_t row) {
    isa.route_row(call.routing, call.logits + row * call.num_experts, call.num_experts,
                  call.topk_ids + row * call.routing.top_k, call.topk_weights + row * call.routing.top_k);
  });
}

void limit_choices(const Isa&, const LimitCall& call) {
  const int64_t num_choices = call.num_tokens * call.top_k;
  const double share = call.capacity.factor * num_choices / call.num_experts;
  const double most = std::max(std::ceil(share), 1.0);
  std::vector<int64_t> taken(call.num_experts, 0);
  int64_t num_dropped = 0;
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    if (++taken.at(call.topk_ids[choice]) <= most) continue;
    call.topk_weights[choice] = 0;
    ++num_dropped;
  }
  call.capacity.counts[0] += num_choices;
  call.capacity.counts[1] += num_dropped;
}

}  // namespace moeflow

// The inner loops of layers with a state: one channel, or value of a head, per lane, through all tokens of a pass, one
// after another. What a lane computes depends on its own channel alone.
#pragma once

#include <cstdint>

#include "ops/activations.h"
#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "ops/recurrent.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

FORCE_INLINE float* state_in(const StateMemory& memory, int32_t slot) {
  return memory.slots + slot * memory.slot_floats + memory.offset;
}

// Calls load(state) or clear() before each sequence, step(row) for each token, and store(state) wherever it is kept.
template <typename Load, typename Clear, typename Step, typename Store>
FORCE_INLINE void through_sequences(const StateSequences& sequences, const StateMemory& memory, const Load& load,
                                    const Clear& clear, const Step& step, const Store& store) {
  int32_t save = 0;
  for (int64_t i = 0; i < sequences.count; ++i) {
    if (sequences.sources[i] < 0) clear();
    else load(state_in(memory, sequences.sources[i]));
    for (int32_t done = 0; done < sequences.counts[i];) {
      step(sequences.first_rows[i] + done);
      ++done;
      for (; save < sequences.save_ends[i] && sequences.save_counts[save] == done; ++save) {
        store(state_in(memory, sequences.save_slots[save]));
      }
    }
    store(state_in(memory, sequences.targets[i]));
  }
}

void conv_lanes(const ShortConvCall& call, int64_t first) {
  const int64_t left = call.num_channels - first, num_kept = call.num_taps - 1;
  FloatLanes weights[kMaxTaps] = {}, kept[kMaxTaps] = {};
  for (int64_t lane = 0; lane < left && lane < kLanes; ++lane) {
    const float* const taps = call.weight + (first + lane) * call.num_taps;
    for (int64_t tap = 0; tap <= num_kept; ++tap) weights[tap][lane] = taps[tap];
  }
  const FloatLanes bias = call.bias == nullptr ? FloatLanes{} : load_some(call.bias + first, left);
  through_sequences(
      call.sequences, call.states,
      [&](const float* state) {
        for (int64_t tap = 0; tap < num_kept; ++tap) {
          kept[tap] = load_some(state + tap * call.num_channels + first, left);
        }
      },
      [&] {
        for (int64_t tap = 0; tap < num_kept; ++tap) kept[tap] = FloatLanes{};
      },
      [&](int64_t row) {
        const int64_t at = row * call.x_stride + first;
        FloatLanes x = load_some(call.x + at, left);
        if (call.in_gate != nullptr) x *= load_some(call.in_gate + at, left);
        kept[num_kept] = x;
        FloatLanes sum = bias;
        for (int64_t tap = 0; tap <= num_kept; ++tap) sum += weights[tap] * kept[tap];
        for (int64_t tap = 0; tap < num_kept; ++tap) kept[tap] = kept[tap + 1];
        if (call.has_silu) sum = apply<Nonlinearity::kSilu>(sum);
        if (call.out_gate != nullptr) sum *= load_some(call.out_gate + at, left);
        store_some(call.out + row * call.num_channels + first, sum, left);
      },
      [&](float* state) {
        for (int64_t tap = 0; tap < num_kept; ++tap) {
          store_some(state + tap * call.num_channels + first, kept[tap], left);
        }
      });
}

void conv_band(const ShortConvCall& call, int64_t first) {
  const int64_t end = first + kBand < call.num_channels ? first + kBand : call.num_channels;
  for (; first < end; first += kLanes) conv_lanes(call, first);
}

// x[i] * scale, filled up with zeros to whole chains.
FORCE_INLINE void scale_into(const float* x, float scale, int64_t size, float* out) {
  const int64_t end = round_up(size, kBand);
  for (int64_t i = 0; i < end; i += kLanes) store_lanes(out + i, load_some(x + i, size - i) * scale);
}

void recurrence_lanes(const RecurrenceCall& call, const RecurrenceGates& gates, int64_t head, int64_t first) {
  constexpr int kChains = 4;  // so that additions need not wait for each other
  const int64_t left = call.value_dim - first;
  const int64_t key_head =
      call.takes_turns ? head % call.num_key_heads : head / (call.num_heads / call.num_key_heads);
  const int64_t num_keys = round_up(call.key_dim, kBand);  // zeros beyond key_dim add nothing
  const int64_t place = head * call.key_dim * call.value_dim + first;
  alignas(64) FloatLanes state[kMaxKeyDim] = {};
  alignas(64) float query[kMaxKeyDim], key[kMaxKeyDim];
  through_sequences(
      call.sequences, call.states,
      [&](const float* from) {
        for (int64_t k = 0; k < call.key_dim; ++k) state[k] = load_some(from + place + k * call.value_dim, left);
        for (int64_t k = call.key_dim; k < num_keys; ++k) state[k] = FloatLanes{};  // or what overflowed before stays
      },
      [&] {
        for (int64_t k = 0; k < num_keys; ++k) state[k] = FloatLanes{};
      },
      [&](int64_t row) {
        const int64_t of_keys = row * call.row_stride + key_head * call.key_dim;
        const int64_t of_values = head * call.value_dim + first;
        const int64_t gate = row * call.num_key_heads + key_head;
        scale_into(call.queries + of_keys, gates.query_scales[gate], call.key_dim, query);
        scale_into(call.keys + of_keys, gates.key_scales[gate], call.key_dim, key);
        const float decay = gates.decays[row * call.num_heads + head];
        const FloatLanes value = load_some(call.values + row * call.row_stride + of_values, left);
        FloatLanes remembered[kChains] = {}, sums[kChains] = {};
        for (int64_t k = 0; k < num_keys; k += kChains) {
#pragma GCC unroll 4
          for (int chain = 0; chain < kChains; ++chain) {
            state[k + chain] *= decay;
            remembered[chain] += state[k + chain] * key[k + chain];
          }
        }
        FloatLanes added = value;
        if (call.is_delta) added -= (remembered[0] + remembered[1]) + (remembered[2] + remembered[3]);
        added *= gates.step_rates[row * call.num_heads + head];
        for (int64_t k = 0; k < num_keys; k += kChains) {
#pragma GCC unroll 4
          for (int chain = 0; chain < kChains; ++chain) {
            state[k + chain] += added * key[k + chain];
            sums[chain] += state[k + chain] * query[k + chain];
          }
        }
        FloatLanes out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (call.skip != nullptr) out += value * call.skip[head];
        store_some(call.out + row * call.num_heads * call.value_dim + of_values, out, left);
      },
      [&](float* to) {
        for (int64_t k = 0; k < call.key_dim; ++k) store_some(to + place + k * call.value_dim, state[k], left);
      });
}

void recurrence_band(const RecurrenceCall& call, const RecurrenceGates& gates, int64_t head, int64_t first) {
  const int64_t end = first + kBand < call.value_dim ? first + kBand : call.value_dim;
  for (; first < end; first += kLanes) recurrence_lanes(call, gates, head, first);
}

// x * gate's function: silu, or sigmoid.
void gate_row(const float* x, const float* gate, bool is_silu, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const FloatLanes g = load_some(gate + i, size - i), share = 1.0f / (exp_vec(-g) + 1.0f);
    store_some(out + i, load_some(x + i, size - i) * (is_silu ? g * share : share), size - i);
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

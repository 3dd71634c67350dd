// Activation functions: what experts make of their hidden units.
#pragma once

#include <cstdint>

#include "simd/isa.h"
#include "simd/isa_unit.h"
#include "formats/matrix.h"
#include "simd/simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

// exp of what a float would hold too roughly, in two halves: for exponents near -80 rounding them alone is an error of
// 2^-18.
FORCE_INLINE FloatLanes exp_doubles(const DoubleLanes (&x)[2]) {
  const FloatLanes high = to_floats(x);
  DoubleLanes rest[2];
  to_doubles(high, rest);
  for (int i = 0; i < 2; ++i) rest[i] = x[i] - rest[i];
  const FloatLanes result = exp_vec(high);
  return result + result * to_floats(rest);
}

// Beyond these, Phi(-size) is not a normal float: taken as 0.
template <Nonlinearity kFunction>
constexpr float kGeluReach = kFunction == Nonlinearity::kGelu ? 13.0f : 9.9f;

// Phi(-size), the share of itself that a negative x keeps.
template <Nonlinearity kFunction>
FORCE_INLINE FloatLanes gelu_share(FloatLanes size) {
  DoubleLanes wide[2];
  to_doubles(size, wide);
  if constexpr (kFunction == Nonlinearity::kGelu) {
    // exp(-size^2 / 2) times a polynomial in t that is within 2^-24 of the rest (a minimax fit).
    const FloatLanes t = 1.0f / (size * 0.35f + 1.0f);
    FloatLanes p = -0.0291258637f - FloatLanes{};
    p = p * t + 0.143872231f;
    p = p * t - 0.255504549f;
    p = p * t + 0.158929273f;
    p = p * t - 0.0229371283f;
    p = p * t + 0.105432935f;
    p = p * t + 0.119852439f;
    p = p * t + 0.13985908f;
    p = p * t + 0.139621571f;
    for (DoubleLanes& half : wide) half = half * half * -0.5;
    return exp_doubles(wide) * (p * t);
  } else {
    // (1 - tanh(u)) / 2 = exp(-2 u) / (1 + exp(-2 u)) with u = sqrt(2 / pi) (size + 0.044715 size^3)
    for (DoubleLanes& half : wide) half = half * (half * half * -0.071354816272600249 - 1.5957691216057307);
    const FloatLanes falling = exp_doubles(wide);
    return falling / (falling + 1.0f);
  }
}

template <Nonlinearity kFunction>
FORCE_INLINE FloatLanes gelu(FloatLanes x) {
  constexpr float kReach = kGeluReach<kFunction>;
  const FloatLanes size = (FloatLanes)((IntLanes)x & 0x7fffffff);
  FloatLanes share = gelu_share<kFunction>(size > kReach ? kReach - FloatLanes{} : size);
  share = size > kReach ? FloatLanes{} : share;
  return x * (x < 0.0f ? share : 1.0f - share);
}

// Not a number stays so.
template <Nonlinearity kFunction>
FORCE_INLINE FloatLanes apply(FloatLanes x) {
  if constexpr (kFunction == Nonlinearity::kSilu) return x / (exp_vec(-x) + 1.0f);
  else if constexpr (kFunction == Nonlinearity::kRelu) return x < 0.0f ? FloatLanes{} : x;
  else return gelu<kFunction>(x);
}

// The function of a gate and an up.
template <Nonlinearity kFunction>
FORCE_INLINE FloatLanes gated(const HiddenUnits& units, FloatLanes gate, FloatLanes up) {
  if constexpr (kFunction == Nonlinearity::kClampedSwiglu) {
    const FloatLanes high = splat_lanes(units.limit), low = splat_lanes(-units.limit);
    gate = gate > high ? high : gate;
    up = up > high ? high : up;
    up = up < low ? low : up;
    return gate / (exp_vec(gate * -units.alpha) + 1.0f) * (up + 1.0f);
  } else {
    return apply<kFunction>(gate) * up;
  }
}

// A part of a band of a tile's results, which are about the units from `unit` on.
FORCE_INLINE FloatLanes biased(const HiddenUnits& units, const float* results, const float* bias, int64_t unit) {
  const FloatLanes x = load_lanes(results);
  return bias == nullptr ? x : x + load_some(bias + unit, units.num_units - unit);
}

// Hidden units of some rows from a tile's results. Gated, bands come in turn:
//
//   tile row   | band 0: gate 0..15 | band 1: up 0..15 | band 2: gate 16..31 | band 3: up 16..31 |
//                         function(gate) * up                    function(gate) * up
//   h row      |        units 0..15                    |         units 16..31                    |
//
// Without a gate each band becomes 16 units: function(up).
template <Nonlinearity kFunction, bool kIsGated>
void activate_as(const HiddenUnits& units) {
  constexpr int kBands = kIsGated ? 2 : 1;  // of 16 units
  const int num_units = units.num_bands / kBands * kBand;
  for (int row = 0; row < units.num_rows; ++row) {
    const float* const results = units.tile_out + row * kTileStride;
    float* const h = units.h + row * units.h_stride;
    for (int unit = 0; unit < num_units; unit += kLanes) {
      const float* const first = results + unit / kBand * kBands * kBand + unit % kBand;
      if constexpr (kIsGated) {
        const FloatLanes gate = biased(units, first, units.gate_bias, unit);
        store_unaligned(h + unit, gated<kFunction>(units, gate, biased(units, first + kBand, units.up_bias, unit)));
      } else {
        store_unaligned(h + unit, apply<kFunction>(biased(units, first, units.up_bias, unit)));
      }
    }
  }
}

template <Nonlinearity kFunction>
void activate_as(const HiddenUnits& units) {
  if (units.is_gated) return activate_as<kFunction, true>(units);
  activate_as<kFunction, false>(units);
}

void activate(const HiddenUnits& units) {
  switch (units.function) {
    case Nonlinearity::kSilu: return activate_as<Nonlinearity::kSilu>(units);
    case Nonlinearity::kGelu: return activate_as<Nonlinearity::kGelu>(units);
    case Nonlinearity::kGeluTanh: return activate_as<Nonlinearity::kGeluTanh>(units);
    case Nonlinearity::kRelu: return activate_as<Nonlinearity::kRelu>(units);
    case Nonlinearity::kClampedSwiglu: return activate_as<Nonlinearity::kClampedSwiglu, true>(units);
  }
}

}  // namespace
}  // namespace ISA_NAMESPACE
}  // namespace moeflow

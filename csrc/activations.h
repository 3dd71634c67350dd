// Activation functions: what experts make of their hidden units.
#pragma once

#include <cstdint>

#include "isa.h"
#include "isa_unit.h"
#include "matrix.h"
#include "simd.h"

namespace moeflow {
namespace ISA_NAMESPACE {
namespace {

typedef double Doubles __attribute__((vector_size(128)));

// exp of what a float would hold too roughly: for exponents near -80 rounding them alone is an error of 2^-18.
FORCE_INLINE Vec exp_doubles(Doubles x) {
  const Vec high = __builtin_convertvector(x, Vec);
  const Vec low = __builtin_convertvector(x - __builtin_convertvector(high, Doubles), Vec);
  const Vec result = exp_vec(high);
  return result + result * low;
}

// Beyond these, Phi(-size) is not a normal float: taken as 0.
template <Nonlinearity kFunction>
constexpr float kGeluReach = kFunction == Nonlinearity::kGelu ? 13.0f : 9.9f;

// Phi(-size), the share of itself that a negative x keeps.
template <Nonlinearity kFunction>
FORCE_INLINE Vec gelu_share(Vec size) {
  const Doubles wide = __builtin_convertvector(size, Doubles);
  if constexpr (kFunction == Nonlinearity::kGelu) {
    // exp(-size^2 / 2) times a polynomial in t that is within 2^-24 of the rest (a minimax fit).
    const Vec t = 1.0f / (size * 0.35f + 1.0f);
    Vec p = -0.0291258637f - Vec{};
    p = p * t + 0.143872231f;
    p = p * t - 0.255504549f;
    p = p * t + 0.158929273f;
    p = p * t - 0.0229371283f;
    p = p * t + 0.105432935f;
    p = p * t + 0.119852439f;
    p = p * t + 0.13985908f;
    p = p * t + 0.139621571f;
    return exp_doubles(wide * wide * -0.5) * (p * t);
  } else {
    // (1 - tanh(u)) / 2 = exp(-2 u) / (1 + exp(-2 u)) with u = sqrt(2 / pi) (size + 0.044715 size^3)
    const Vec falling = exp_doubles(wide * (wide * wide * -0.071354816272600249 - 1.5957691216057307));
    return falling / (falling + 1.0f);
  }
}

template <Nonlinearity kFunction>
FORCE_INLINE Vec gelu(Vec x) {
  constexpr float kReach = kGeluReach<kFunction>;
  const Vec size = (Vec)((IVec)x & 0x7fffffff);
  Vec share = gelu_share<kFunction>(size > kReach ? kReach - Vec{} : size);
  share = size > kReach ? Vec{} : share;
  return x * (x < 0.0f ? share : 1.0f - share);
}

// Not a number stays so.
template <Nonlinearity kFunction>
FORCE_INLINE Vec apply(Vec x) {
  if constexpr (kFunction == Nonlinearity::kSilu) return x / (exp_vec(-x) + 1.0f);
  else if constexpr (kFunction == Nonlinearity::kRelu) return x < 0.0f ? Vec{} : x;
  else return gelu<kFunction>(x);
}

// What is meant by a gate and an up.
template <Nonlinearity kFunction>
FORCE_INLINE Vec gated(const HiddenUnits& units, Vec gate, Vec up) {
  if constexpr (kFunction == Nonlinearity::kClampedSwiglu) {
    const Vec high = splat(units.limit), low = splat(-units.limit);
    gate = gate > high ? high : gate;
    up = up > high ? high : up;
    up = up < low ? low : up;
    return gate / (exp_vec(gate * -units.alpha) + 1.0f) * (up + 1.0f);
  } else {
    return apply<kFunction>(gate) * up;
  }
}

// A band of a tile's results, which is about the 16 units from `unit` on.
FORCE_INLINE Vec biased(const HiddenUnits& units, int row, int band, const float* bias, int64_t unit) {
  const Vec x = load(units.tile_out + row * kTileStride + band * kBand);
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
  for (int row = 0; row < units.num_rows; ++row) {
    float* const h = units.h + row * units.h_stride;
    int64_t unit = 0;
    for (int band = 0; band < units.num_bands; band += kIsGated ? 2 : 1, unit += kBand) {
      if constexpr (kIsGated) {
        const Vec gate = biased(units, row, band, units.gate_bias, unit);
        store_some(h + unit, gated<kFunction>(units, gate, biased(units, row, band + 1, units.up_bias, unit)), kBand);
      } else {
        store_some(h + unit, apply<kFunction>(biased(units, row, band, units.up_bias, unit)), kBand);
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

// Products of small integers, added up within each lane: what tiles of integer weights are made of. Exact, whichever
// instructions make them.
//
//   dot_unsigned   acc += w * x over the 4 bytes of each lane; w unsigned (on ARM below 128), x signed, the same in all
//   dot_int8       the same with signed w, to which some instructions add kInt8Offset: the caller undoes that
//   dot_int8_without_least   the same where no w is -128: quicker where more w than x meet (where HAS_PAIRED_PRODUCTS)
//   dot_pairs      acc += w * x over the two 16-bit halves of each lane, both signed; x the same in every lane
//
//   lane        |        0        |        1        | ..
//   w           | w0  w1  w2  w3  | w0' w1' w2' w3' |       four neighbouring k of one output
//   x4          | x0  x1  x2  x3  | x0  x1  x2  x3  |       the same four k of one row
//   acc +=      w0 x0 + .. + w3 x3        likewise
#pragma once

#include "simd/int_dot_plain.h"
#include "simd/isa_unit.h"
#include "simd/simd.h"

#if defined(__x86_64__)
#include "simd/int_dot_x86.h"
#elif IS_NEON
#include "simd/int_dot_neon.h"
#endif

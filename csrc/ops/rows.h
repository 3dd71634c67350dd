// Work on many independent rows. Little of it is done where the caller is: waking other threads takes longer.
#pragma once

#include <cstdint>

#include "threads/pool.h"

namespace moeflow {

constexpr int64_t kFewFloats = 32768;  // about 10 microseconds of one thread

// Calls use(row) once for each row, in any order. `row_floats` is the work of a row.
template <typename Use>
void for_each_row(int64_t num_rows, int64_t row_floats, const Use& use) {
  struct Rows {
    const Use& use;
    int64_t num_rows;
  };
  if (num_threads() == 1 || num_rows == 1 || num_rows * row_floats <= kFewFloats) {
    for (int64_t row = 0; row < num_rows; ++row) use(row);
    return;
  }
  Rows rows{use, num_rows};
  run_on_pool(
      [](void* context, Team& team, int thread_idx) {
        const Rows& rows = *static_cast<const Rows*>(context);
        team.for_each(0, rows.num_rows, thread_idx, [&](int64_t row, int64_t) { rows.use(row); });
      },
      &rows);
}

}  // namespace moeflow

// A dense layer: the rows of x are prepared once, then each thread takes bands of outputs and multiplies a
// band with every row while it is in the cache.
#include "ops.h"
#include "pool.h"
#include "workspace.h"

namespace moeflow {
namespace {

constexpr int64_t kRowBlock = 96;  // rows whose activations stay in L2 beside the bands

struct LinearJob {
  const Isa& isa;
  const LinearCall& call;
  Activation kind;
  int64_t row_bytes;
  uint8_t* prepared;  // [num_rows, row_bytes]
};

void write_tile(const LinearCall& call, const float* tile_out, int64_t row, int num_rows, int64_t col, int64_t num_cols) {
  const int64_t n = call.weight.rows;
  for (int r = 0; r < num_rows; ++r) {
    const float* from = tile_out + r * kTileStride;
    const int64_t at = (row + r) * n + col;
    for (int64_t c = 0; c < num_cols; ++c) {
      float value = from[c];
      if (call.bias != nullptr) value += call.bias[col + c];
      if (call.residual != nullptr) value += call.residual[at + c];
      call.out[at + c] = value;
    }
  }
}

void multiply(const LinearJob& job, int64_t first_band, int64_t first_row, int64_t last_row) {
  const LinearCall& call = job.call;
  alignas(64) float tile_out[kMaxTileRows * kTileStride];
  const void* rows[kMaxTileRows];
  const int64_t bands = num_bands(call.weight.rows) - first_band;
  Tile tile{call.weight.band(first_band), band_bytes(call.weight.format, call.weight.cols),
            static_cast<int>(bands < kMaxTileBands ? bands : kMaxTileBands), rows, 0, call.weight.cols, tile_out};
  const int64_t col = first_band * kBand, cols_left = call.weight.rows - col;
  const int64_t num_cols = cols_left < tile.num_bands * kBand ? cols_left : tile.num_bands * kBand;
  for (int64_t row = first_row; row < last_row; row += kMaxTileRows) {
    tile.num_rows = static_cast<int>(last_row - row < kMaxTileRows ? last_row - row : kMaxTileRows);
    for (int r = 0; r < tile.num_rows; ++r) rows[r] = job.prepared + (row + r) * job.row_bytes;
    job.isa.tile(call.weight.format, tile);
    write_tile(call, tile_out, row, tile.num_rows, col, num_cols);
  }
}

void run(void* context, Team& team, int) {
  const LinearJob& job = *static_cast<const LinearJob*>(context);
  const LinearCall& call = job.call;
  for (int64_t row; (row = team.counter(0).take()) < call.num_rows;) {
    job.isa.prepare_row(job.kind, call.x + row * call.x_stride, call.weight.cols, job.prepared + row * job.row_bytes);
  }
  team.barrier();
  const int64_t groups = (num_bands(call.weight.rows) + kMaxTileBands - 1) / kMaxTileBands;
  const int64_t blocks = (call.num_rows + kRowBlock - 1) / kRowBlock;
  for (int64_t item; (item = team.counter(1).take()) < groups * blocks;) {
    const int64_t first_row = item / groups * kRowBlock;
    const int64_t last_row = first_row + kRowBlock < call.num_rows ? first_row + kRowBlock : call.num_rows;
    multiply(job, item % groups * kMaxTileBands, first_row, last_row);
  }
}

}  // namespace

void linear(const Isa& isa, const LinearCall& call) {
  if (call.num_rows == 0) return;
  const Activation kind = isa.activation(call.weight.format);
  const int64_t row_bytes = activation_bytes(kind, call.weight.cols);
  WorkspaceLock workspace;
  workspace->begin(call.num_rows * row_bytes);
  LinearJob job{isa, call, kind, row_bytes, workspace->take<uint8_t>(call.num_rows * row_bytes)};
  run_on_pool(run, &job);
}

}  // namespace moeflow

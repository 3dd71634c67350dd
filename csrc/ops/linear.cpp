// A dense layer: the rows of x are prepared once. Then each thread takes bands of outputs, and multiplies a band with
// every row while it is in the cache. The calling thread prepares a few rows alone, which saves a barrier. It also
// computes small products, such as a router's. Heads with matrices of their own are so
// many products at once.
#include "ops/ops.h"
#include "threads/pool.h"
#include "ops/workspace.h"

namespace moeflow {
namespace {

constexpr int64_t kRowBlock = 96;  // rows with activations that fit L2 next to the bands
constexpr int64_t kFewRows = 4;
constexpr int64_t kSmallProduct = 65536;  // bytes of weights times rows: some microseconds

struct LinearJob {
  const Isa& isa;
  const LinearCall& call;
  Activation kind;
  int64_t row_bytes;
  uint8_t* prepared = nullptr;  // [num_heads, num_rows, row_bytes]
  float* normed = nullptr;      // a row for each thread, if there is a norm
  bool is_prepared = false;

  int64_t num_items() const { return call.num_heads * call.num_rows; }  // rows to prepare
  int64_t head_bands() const { return num_bands(call.weight.rows) / call.num_heads; }
  int64_t head_rows() const { return call.num_heads > 1 ? call.head_rows : call.weight.rows; }  // outputs
};

// `item` counts a head's rows, one head after another.
void prepare(const LinearJob& job, int64_t item, int thread_idx) {
  const LinearCall& call = job.call;
  const int64_t cols = call.weight.cols;
  const float* x = call.x + item % call.num_rows * call.x_stride + item / call.num_rows * call.x_head_stride;
  if (call.norm.weight != nullptr) {
    float* const normed = job.normed + thread_idx * padded_cols(cols);
    normalise_row(job.isa, call.norm, x, cols, normed);
    x = normed;
  }
  prepare_row(job.isa, job.kind, x, cols, job.prepared + item * job.row_bytes);
}

void write_tile(const Isa& isa, const LinearCall& call, const float* tile_out, int64_t head, int64_t row, int num_rows,
                int64_t col, int64_t num_cols) {
  const int64_t n = call.out_stride > 0 ? call.out_stride : call.weight.rows;
  for (int r = 0; r < num_rows; ++r) {
    const int64_t at = (row + r) * n + head * call.out_head_stride + col;
    isa.add_row(tile_out + r * kTileStride, call.bias == nullptr ? nullptr : call.bias + col,
                call.residual == nullptr ? nullptr : call.residual + at, num_cols, call.out + at);
  }
}

void multiply(const LinearJob& job, int64_t head, int64_t first_band, int64_t first_row, int64_t last_row,
              const uint8_t* following) {
  const LinearCall& call = job.call;
  alignas(64) float tile_out[kMaxTileRows * kTileStride];
  const void* rows[kMaxTileRows];
  const int64_t bands = job.head_bands() - first_band;
  Tile tile{};
  tile.bands = call.weight.band(head * job.head_bands() + first_band);
  tile.band_stride = band_bytes(call.weight.format, call.weight.cols);
  tile.num_bands = static_cast<int>(bands < kMaxTileBands ? bands : kMaxTileBands);
  tile.rows = rows;
  tile.cols = call.weight.cols;
  tile.out = tile_out;
  tile.following = following;
  const int64_t col = first_band * kBand, cols_left = job.head_rows() - col;
  const int64_t num_cols = cols_left < tile.num_bands * kBand ? cols_left : tile.num_bands * kBand;
  for (int64_t row = first_row; row < last_row; row += kMaxTileRows) {
    tile.num_rows = static_cast<int>(last_row - row < kMaxTileRows ? last_row - row : kMaxTileRows);
    const uint8_t* const prepared = job.prepared + (head * call.num_rows + row) * job.row_bytes;
    for (int r = 0; r < tile.num_rows; ++r) rows[r] = prepared + r * job.row_bytes;
    tile.fetch = fetch_in(row == first_row, row + kMaxTileRows >= last_row);
    job.isa.tile(call.weight, tile);
    write_tile(job.isa, call, tile_out, head, row, tile.num_rows, col, num_cols);
  }
}

// Rows that share a group of bands. Where threads outnumber the groups, as a router's, rows are cut finer.
int64_t rows_of_block(int64_t num_rows, int64_t groups, int64_t threads) {
  const int64_t sharers = (threads + groups - 1) / groups, rows = (num_rows + sharers - 1) / sharers;
  return rows < kRowBlock ? rows : kRowBlock;
}

void run(void* context, Team& team, int thread_idx) {
  const LinearJob& job = *static_cast<const LinearJob*>(context);
  const LinearCall& call = job.call;
  if (!job.is_prepared) {
    team.for_each(0, job.num_items(), thread_idx, [&](int64_t item, int64_t) { prepare(job, item, thread_idx); });
    team.barrier();
  }
  const int64_t head_groups = (job.head_bands() + kMaxTileBands - 1) / kMaxTileBands;
  const int64_t groups = call.num_heads * head_groups, block = rows_of_block(call.num_rows, groups, team.num_threads());
  const int64_t blocks = (call.num_rows + block - 1) / block;
  const auto head = [&](int64_t item) { return item % groups / head_groups; };
  const auto first_band = [&](int64_t item) { return item % groups % head_groups * kMaxTileBands; };
  team.for_each(1, groups * blocks, thread_idx, [&](int64_t item, int64_t next) {
    const int64_t first_row = item / groups * block;
    const int64_t last_row = first_row + block < call.num_rows ? first_row + block : call.num_rows;
    multiply(job, head(item), first_band(item), first_row, last_row,
             next < groups * blocks ? call.weight.band(head(next) * job.head_bands() + first_band(next)) : nullptr);
  });
}

}  // namespace

void linear(const Isa& isa, const LinearCall& call) {
  if (call.num_rows == 0 || call.weight.rows == 0) return;  // a rank's share of the outputs may be none
  const Activation kind = isa.activation(call.weight);
  const int64_t row_bytes = activation_bytes(kind, call.weight.cols);
  const int64_t bytes = band_bytes(call.weight.format, call.weight.cols) * num_bands(call.weight.rows) * call.num_rows;
  const bool is_small = bytes <= kSmallProduct;
  WorkspaceLock workspace;
  const int64_t normed = call.norm.weight == nullptr ? 0 : num_threads() * padded_cols(call.weight.cols);
  const int64_t prepared_bytes = call.num_heads * call.num_rows * row_bytes;
  workspace->begin(Workspace::padded<uint8_t>(prepared_bytes) + Workspace::padded<float>(normed));
  LinearJob job{isa, call, kind, row_bytes};
  job.prepared = workspace->take<uint8_t>(prepared_bytes);
  job.normed = workspace->take<float>(normed);
  job.is_prepared = is_small || job.num_items() <= kFewRows;
  if (job.is_prepared) {
    for (int64_t item = 0; item < job.num_items(); ++item) prepare(job, item, 0);
  }
  if (is_small) {
    Team alone;
    run(&job, alone, 0);
  } else {
    run_on_pool(run, &job);
  }
}

}  // namespace moeflow

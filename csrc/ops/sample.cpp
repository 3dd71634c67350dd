// A token of each row: the likeliest, or by the inverse of the cumulative distribution at one number. Each row by itself, its sums in
// double and in an order that depends on its size only.
//
// Over the whole vocabulary in its order: two sweeps, one for the sums of blocks, one over the block with the
// threshold. Under top-k or top-p, likeliest first: a sweep finds a few candidates that include the result, and only
// these are sorted, as far as needed.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>

#include "ops/ops.h"
#include "threads/pool.h"
#include "ops/rows.h"
#include "ops/workspace.h"

namespace moeflow {
namespace {

constexpr int64_t kBlock = 256, kMaxBlocks = 512;
constexpr float kLeastWeight = 1.3e-38f;  // exp_vec makes nothing smaller, whatever it is given
constexpr double kFirstCut = 1024;        // a nucleus is first looked for among so many tokens, were they all alike

struct Candidate {
  float x, weight;
  int32_t place;
};

bool is_likelier(const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.place < b.place); }

// A row to sample from, and memory for its candidates.
struct Row {
  const Isa& isa;
  const float* x;
  int64_t size;
  const RowSampling& sampling;
  float max_logit;
  Weighing weighing;      // without min_p
  int32_t* places;        // [size]
  Candidate* candidates;  // [size]
  float* maxima;          // [size + kBand]
};

// Where on the way to `mass` the token lies: below it, however it is rounded.
double threshold_of(double number, double mass) { return std::min(number * mass, std::nextafter(mass, 0.0)); }

int64_t block_size(int64_t size) { return round_up((size + kMaxBlocks - 1) / kMaxBlocks, kBlock); }

double sum_blocks(const Row& row, const Weighing& weighing, double* sums) {
  const int64_t block = block_size(row.size);
  double total = 0;
  for (int64_t i = 0, first = 0; first < row.size; ++i, first += block) {
    sums[i] = row.isa.sum_weights(row.x + first, std::min(block, row.size - first), weighing);
    total += sums[i];
  }
  return total;
}

int64_t sample_in_order(const Row& row) {
  Weighing weighing = row.weighing;
  weighing.least = std::max(weighing.least, row.sampling.min_p);
  double sums[kMaxBlocks];
  const double threshold = threshold_of(row.sampling.number, sum_blocks(row, weighing, sums));
  const int64_t block = block_size(row.size);
  int64_t first = 0;
  double cumulative = 0;
  for (int64_t i = 0; first < row.size && !(cumulative + sums[i] > threshold); ++i, first += block) {
    cumulative += sums[i];
  }
  int64_t token = -1;
  const int64_t stop = std::min(first + block, row.size);
  for (; first < stop; first += kBlock) {
    float weights[kBlock];
    const int64_t count = std::min(kBlock, stop - first);
    row.isa.store_weights(row.x + first, count, weighing, weights);
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] == 0) continue;
      token = first + i;  // the last one, should this order of additions not reach what that of the lanes did
      cumulative += weights[i];
      if (cumulative > threshold) return token;
    }
  }
  return token;
}

// The tokens whose x is at least `bound`, with their weights.
int64_t find_candidates(const Row& row, float bound) {
  const int64_t found = row.isa.places_at_least(row.x, row.size, bound, row.places);
  for (int64_t first = 0; first < found; first += kBlock) {
    float x[kBlock], weights[kBlock];
    const int64_t count = std::min(kBlock, found - first);
    for (int64_t i = 0; i < count; ++i) x[i] = row.x[row.places[first + i]];
    row.isa.store_weights(x, count, row.weighing, weights);
    for (int64_t i = 0; i < count; ++i) row.candidates[first + i] = {x[i], weights[i], row.places[first + i]};
  }
  return found;
}

double sum_candidates(const Candidate* first, const Candidate* last) {
  double sum = 0;
  for (; first != last; ++first) sum += first->weight;
  return sum;
}

// At least k values are no less than the k-th largest of the maxima of groups.
float bound_of_top_k(const Row& row, int64_t k) {
  const int64_t runs = (4 * k + kBand - 1) / kBand, run = row.size / runs / kBand * kBand;
  if (run < 4 * kBand) return -std::numeric_limits<float>::infinity();
  int64_t groups = 0;
  for (int64_t first = 0; first < row.size; first += run, groups += kBand) {
    row.isa.lane_maxima(row.x + first, std::min(run, row.size - first), row.maxima + groups);
  }
  std::nth_element(row.maxima, row.maxima + k - 1, row.maxima + groups, std::greater<float>());
  return row.maxima[k - 1];
}

struct Found {
  int64_t count;
  double mass;  // for the share of top-p
};

Found find_top_k(const Row& row) {
  const int64_t k = std::min(row.sampling.top_k, row.size);
  int64_t count = find_candidates(row, bound_of_top_k(row, k));
  if (count > k) {
    std::nth_element(row.candidates, row.candidates + k - 1, row.candidates + count, is_likelier);
    count = k;
  }
  return {count, sum_candidates(row.candidates, row.candidates + count)};
}

// Tokens with less than a V-th of the weight outside the nucleus cannot be in it. Most often a much higher cut
// does: if those above it weigh enough, they hold the nucleus.
Found find_nucleus(const Row& row) {
  double sums[kMaxBlocks];
  const double total = sum_blocks(row, row.weighing, sums), outside = (1 - row.sampling.top_p) * total;
  const auto find_above = [&](double cut) {
    const double bound = row.max_logit + std::log(cut) / row.weighing.inverse_temperature;
    const double rounding = 1e-6 * (std::fabs(row.max_logit) + std::fabs(bound));
    return find_candidates(row, static_cast<float>(bound - rounding));
  };
  int64_t count = find_above(outside / kFirstCut);
  if (sum_candidates(row.candidates, row.candidates + count) < row.sampling.top_p * total) {
    count = find_above(outside / static_cast<double>(row.size));
  }
  return {count, total};
}

// Candidates by how likely they are, in bins of equal width in x, so that only one bin has to be put in order.
class Bins {
 public:
  Bins(Candidate* candidates, int64_t count) : candidates_(candidates), count_(count), top_(candidates[0].x) {
    float bottom = top_;
    for (int64_t i = 1; i < count; ++i) {
      top_ = std::max(top_, candidates[i].x);
      bottom = std::min(bottom, candidates[i].x);
    }
    if (top_ > bottom) scale_ = std::min((kBins - 1) / (top_ - bottom), std::numeric_limits<float>::max());
    for (int64_t i = 0; i < count; ++i) masses_[bin_of(candidates[i])] += candidates[i].weight;
  }

  struct Found {
    int32_t place;
    double mass;  // of this candidate and all likelier ones
  };

  // The likeliest candidate with which the mass has passed, or the last one. Later searches must not go beyond this
  // result: bins after it are dropped.
  template <typename HasPassed>
  Found find(const HasPassed& has_passed) {
    int bin = 0;
    double mass = 0, before = 0;
    for (int i = 0; i < num_bins_; ++i) {
      if (masses_[i] == 0) continue;
      bin = i, before = mass;
      mass += masses_[i];
      if (has_passed(mass)) break;
    }
    num_bins_ = bin + 1;
    mass = before;
    Candidate* const end =
        std::partition(candidates_, candidates_ + count_, [&](const Candidate& each) { return bin_of(each) == bin; });
    std::sort(candidates_, end, is_likelier);
    const Candidate* each = candidates_;
    for (mass += each->weight; each + 1 < end && !has_passed(mass);) mass += (++each)->weight;
    return {each->place, mass};
  }

 private:
  static constexpr int kBins = 512;

  int bin_of(const Candidate& candidate) const { return static_cast<int>((top_ - candidate.x) * scale_); }

  Candidate* candidates_;
  int64_t count_;
  int num_bins_ = kBins;
  float top_, scale_ = 0;
  double masses_[kBins] = {};
};

int64_t sample_likeliest_first(const Row& row) {
  const Found found = row.sampling.top_k > 0 ? find_top_k(row) : find_nucleus(row);
  const float least = std::max(kLeastWeight, row.sampling.min_p);
  const Candidate* const end = std::remove_if(row.candidates, row.candidates + found.count,
                                              [&](const Candidate& candidate) { return !(candidate.weight >= least); });
  if (end == row.candidates) return -1;
  Bins bins(row.candidates, end - row.candidates);
  const double allowed =
      row.sampling.top_p < 1 ? row.sampling.top_p * found.mass : std::numeric_limits<double>::infinity();
  const double mass = bins.find([&](double so_far) { return so_far >= allowed; }).mass;
  const double threshold = threshold_of(row.sampling.number, mass);
  return bins.find([&](double so_far) { return so_far > threshold; }).place;
}

// Whether a token is looked for among candidates, likeliest first.
bool is_ranked(const RowSampling& sampling) {
  return sampling.temperature != 0 && (sampling.top_k > 0 || sampling.top_p < 1);
}

struct SampleJob {
  const Isa& isa;
  const SampleCall& call;
  uint8_t* memory;
  size_t thread_bytes;

  static size_t bytes(int64_t size) {
    return Workspace::padded<Candidate>(size) + Workspace::padded<int32_t>(size) +
           Workspace::padded<float>(size + kBand);
  }

  void sample(int64_t i, int thread) const {
    const RowSampling& sampling = call.samplings[i];
    const float* const x = call.x + sampling.row * call.size;
    const Argmax likeliest = isa.argmax_row(x, call.size);
    if (!std::isfinite(likeliest.value) || sampling.temperature == 0) {
      call.tokens[i] = std::isfinite(likeliest.value) ? likeliest.index : -1;
      return;
    }
    uint8_t* const own = memory + thread * thread_bytes;
    uint8_t* const places = own + Workspace::padded<Candidate>(call.size);
    uint8_t* const maxima = places + Workspace::padded<int32_t>(call.size);
    const Row row{isa,
                  x,
                  call.size,
                  sampling,
                  likeliest.value,
                  Weighing{likeliest.value, 1 / sampling.temperature, kLeastWeight},
                  reinterpret_cast<int32_t*>(places),
                  reinterpret_cast<Candidate*>(own),
                  reinterpret_cast<float*>(maxima)};
    call.tokens[i] = is_ranked(sampling) ? sample_likeliest_first(row) : sample_in_order(row);
  }
};

}  // namespace

void sample(const Isa& isa, const SampleCall& call) {
  if (call.size > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("places in a row are counted in 32 bits");
  }
  for (int64_t i = 0; i < call.num_samplings; ++i) {
    const int64_t row = call.samplings[i].row;
    if (row < 0 || row >= call.num_rows) throw std::out_of_range("a row that is not there");
  }
  WorkspaceLock workspace;
  const bool has_candidates = std::any_of(call.samplings, call.samplings + call.num_samplings, is_ranked);
  SampleJob job{isa, call, nullptr, has_candidates ? SampleJob::bytes(call.size) : 0};
  workspace->begin(num_threads() * job.thread_bytes);
  job.memory = workspace->take<uint8_t>(num_threads() * job.thread_bytes);
  if (num_threads() == 1 || call.num_samplings * call.size <= kFewFloats || call.num_samplings == 1) {
    for (int64_t i = 0; i < call.num_samplings; ++i) job.sample(i, 0);
    return;
  }
  run_on_pool(
      [](void* context, Team& team, int thread) {
        const SampleJob& job = *static_cast<const SampleJob*>(context);
        team.for_each(0, job.call.num_samplings, thread, [&](int64_t i, int64_t) { job.sample(i, thread); });
      },
      &job);
}

}  // namespace moeflow

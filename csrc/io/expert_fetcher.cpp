#include "io/expert_fetcher.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "ops/ops.h"
#include "threads/clock.h"

namespace moeflow {
namespace {

constexpr double kPatienceS = 0.1;  // Python can be interrupted while it waits

}  // namespace

ExpertFetcher::ExpertFetcher(SlabReader& reader, int32_t* table, int64_t num_layers, int64_t num_experts)
    : reader_(reader), table_(table), num_experts_(num_experts), worth_(num_layers * num_experts),
      worth_used_(worth_.size()), worth_unused_(worth_.size()), may_leave_(worth_.size()), is_kept_(worth_.size()),
      has_used_(worth_.size()), is_needed_(num_experts) {}

void ExpertFetcher::begin(std::vector<int32_t> free_slots, const Worth* worth, int64_t max_prefetches,
                          int64_t max_needed) {
  free_ = std::move(free_slots);
  may_evict_ = worth != nullptr;
  if (may_evict_) {
    const int64_t total = static_cast<int64_t>(worth_.size());
    std::copy_n(worth->before, total, worth_.begin());
    std::copy_n(worth->used, total, worth_used_.begin());
    std::copy_n(worth->unused, total, worth_unused_.begin());
    std::copy_n(worth->may_leave, total, may_leave_.begin());
  }
  prefetch_room_ = max_prefetches;
  max_needed_ = max_needed;
  prefetches_.clear();
  missing_.clear();
  std::fill(is_kept_.begin(), is_kept_.end(), 0);
  std::fill(has_used_.begin(), has_used_.end(), 0);
  journal_ = FetchJournal{};
}

FetchJournal ExpertFetcher::end() {
  collect();
  free_.clear();
  may_evict_ = false;
  return std::exchange(journal_, FetchJournal{});
}

void ExpertFetcher::collect() {
  if (!reader_.has_ended()) return;
  for (const EndedRead& read : reader_.take_ended()) {
    const int32_t expert = static_cast<int32_t>(read.slab);
    place(expert) = read.is_right ? static_cast<int32_t>(read.slot) : kAbsent;
    note(read.is_right ? FetchEvent::kArrived : FetchEvent::kFailed, expert, read.slot);
    has_failed_ |= !read.is_right && std::find(missing_.begin(), missing_.end(), expert) != missing_.end();
    const auto mine = std::find(prefetches_.begin(), prefetches_.end(), expert);
    if (mine != prefetches_.end()) {
      prefetches_.erase(mine);
      ++prefetch_room_;
    }
  }
}

bool ExpertFetcher::request(int64_t layer, const int64_t* ids, int64_t count) {
  collect();
  needed_.clear();
  std::fill(is_needed_.begin(), is_needed_.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_experts_) throw std::out_of_range("topk_ids names an expert that is not there");
    if (is_needed_[ids[i]] != 0) continue;
    is_needed_[ids[i]] = 1;
    const int32_t expert = static_cast<int32_t>(layer * num_experts_ + ids[i]);
    needed_.push_back(expert);
    is_kept_[expert] = 1;
  }
  late_ = misses_ = 0;
  has_failed_ = false;
  missing_.clear();
  cancel_others(layer);
  pass_by(layer);
  const auto is_absent = [&](int32_t expert) { return place(expert) < 0; };
  const int64_t num_absent = std::count_if(needed_.begin(), needed_.end(), is_absent);
  if (num_absent == 0) return true;
  if (!may_load() || static_cast<int64_t>(needed_.size()) > max_needed_) return false;
  if (num_slots_up_to(num_absent) < num_absent) return false;
  std::vector<std::tuple<int64_t, int64_t>> loads;
  for (const int32_t expert : needed_) {
    if (!is_absent(expert)) continue;
    missing_.push_back(expert);
    if (place(expert) == kLoading && !take_back(expert)) {
      note(FetchEvent::kJoined, expert, reader_.slot_of(expert));
      ++late_;
      continue;
    }
    const int32_t slot = take_slot();
    place(expert) = kLoading;
    note(FetchEvent::kLoading, expert, slot);
    loads.emplace_back(expert, slot);
    ++misses_;
  }
  const bool waits_at_once = num_absent == static_cast<int64_t>(needed_.size());  // there is nothing to compute
  if (!loads.empty()) reader_.submit(loads, true, waits_at_once);
  return true;
}

bool ExpertFetcher::wait() {
  const size_t before = missing_.size();
  const int64_t start_ns = now_ns(), layer = missing_.front() / num_experts_;
  bool is_in_time = true;
  while (is_in_time && !has_failed_ && missing_.size() == before) {
    is_in_time = reader_.has_ended() || reader_.wait(kPatienceS);
    collect();
    update_missing();
  }
  const int64_t end_ns = now_ns();
  journal_.stall_s += 1e-9 * static_cast<double>(end_ns - start_ns);
  if (reader_.keeps_spans()) journal_.waits.push_back({layer, start_ns, end_ns});
  return missing_.size() < before && !has_failed_;
}

void ExpertFetcher::finish() {
  journal_.num_late += late_;
  journal_.num_misses += misses_;
  for (const int32_t expert : needed_) {
    is_kept_[expert] = 0;
    has_used_[expert] = 1;
  }
}

void ExpertFetcher::prefetch(int64_t layer, const int64_t* ids, int64_t num_tokens, int64_t top_k) {
  for (int64_t i = 0; i < num_tokens * top_k; ++i) {
    const int64_t id = ids[i % num_tokens * top_k + i / num_tokens];
    const int32_t expert = static_cast<int32_t>(layer * num_experts_ + id);
    is_kept_[expert] = 1;
    if (place(expert) != kAbsent || prefetch_room_ <= 0 || num_slots_up_to(1) < 1) continue;
    const int32_t slot = take_slot();
    place(expert) = kLoading;
    note(FetchEvent::kPrefetching, expert, slot);
    reader_.submit({{expert, slot}}, false, false);
    prefetches_.push_back(expert);
    --prefetch_room_;
  }
}

// There must be one.
int32_t ExpertFetcher::take_slot() {
  if (!free_.empty()) {
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  int32_t victim = -1;
  for (int32_t expert = 0; expert < static_cast<int32_t>(worth_.size()); ++expert) {
    if (can_leave(expert) && (victim < 0 || worth_[expert] < worth_[victim])) victim = expert;
  }
  const int32_t slot = place(victim);
  place(victim) = kAbsent;
  note(has_used_[victim] != 0 ? FetchEvent::kRetired : FetchEvent::kEvicted, victim, slot);
  return slot;
}

bool ExpertFetcher::can_leave(int32_t expert) const {
  return table_[expert] >= 0 && may_leave_[expert] == MayLeave::kNow && is_kept_[expert] == 0 &&
         worth_[expert] < std::numeric_limits<double>::infinity();
}

// The pass has reached a layer: from now on its experts have their worth for the next pass.
void ExpertFetcher::pass_by(int64_t layer) {
  if (!may_evict_) return;
  for (int64_t id = 0; id < num_experts_; ++id) {
    const int64_t expert = layer * num_experts_ + id;
    worth_[expert] = is_needed_[id] != 0 ? worth_used_[expert] : worth_unused_[expert];
    if (may_leave_[expert] == MayLeave::kBehind) may_leave_[expert] = MayLeave::kNow;
  }
}

// How many slots there are to take; no more are counted than these.
int64_t ExpertFetcher::num_slots_up_to(int64_t count) const {
  int64_t found = static_cast<int64_t>(free_.size());
  if (!may_evict_) return found;
  for (int32_t expert = 0; expert < static_cast<int32_t>(worth_.size()) && found < count; ++expert) {
    found += can_leave(expert);
  }
  return found;
}

bool ExpertFetcher::take_back(int32_t expert) {
  if (!reader_.cancel_prefetch(expert)) return false;
  const int64_t slot = reader_.slot_of(expert);
  place(expert) = kAbsent;
  note(FetchEvent::kCancelled, expert, slot);
  free_.push_back(static_cast<int32_t>(slot));
  const auto mine = std::find(prefetches_.begin(), prefetches_.end(), expert);
  if (mine != prefetches_.end()) {
    prefetches_.erase(mine);
    ++prefetch_room_;
  }
  return true;
}

void ExpertFetcher::cancel_others(int64_t layer) {
  const std::vector<int32_t> prefetches = prefetches_;
  for (const int32_t expert : prefetches) {
    if (expert / num_experts_ == layer && is_needed_[expert % num_experts_] == 0) take_back(expert);
  }
}

void ExpertFetcher::update_missing() {
  missing_.erase(
      std::remove_if(missing_.begin(), missing_.end(), [&](int32_t expert) { return place(expert) >= 0; }),
      missing_.end());
}

}  // namespace moeflow

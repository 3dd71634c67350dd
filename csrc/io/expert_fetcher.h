// Reads experts into slots during a pass, without Python: into slots lent before, in their given order. It records its
// actions in a journal, which Python reads afterwards.
//
// One thread at a time uses it, from `begin` to `end`. Experts are numbered over all layers, as slabs are.
#pragma once

#include <cstdint>
#include <vector>

#include "io/slab_reader.h"

namespace moeflow {

// What happened to an expert.
enum class FetchEvent : int32_t {
  kEvicted,     // left its slot
  kRetired,     // left its slot after the pass had used it
  kLoading,     // began to come into a slot, because the pass needs it
  kPrefetching,  // likewise, because it may
  kJoined,      // was on its way, and the pass needs it
  kCancelled,   // is not on its way any more: its read had not begun
  kArrived,
  kFailed,  // was not read completely, or is damaged
};

struct FetchEntry {
  FetchEvent event;
  int32_t expert, slot;
};

// A pass waited for experts of a layer, in nanoseconds of the steady clock.
struct FetchWait {
  int64_t layer, start_ns, end_ns;
};

// What happened from `begin` to `end`.
struct FetchJournal {
  std::vector<FetchEntry> entries;
  // Experts that layers which were finished needed, and that were not there:
  int64_t num_late = 0;    // on their way already,
  int64_t num_misses = 0;  // or not.
  double stall_s = 0;      // the pass waited
  std::vector<FetchWait> waits;  // each time; only while the reader keeps spans
};

// Which experts may leave: never while the pass runs, now, or as soon as it has computed their layer.
enum class MayLeave : uint8_t { kNever, kNow, kBehind };

// What experts are worth to later layers and passes; each is an array over all layers. The least worth is evicted
// first.
struct Worth {
  const double* before;  // the pass has yet to come to their layer
  const double* used;    // it has used them; infinite: they stay
  const double* unused;  // it has not
  const MayLeave* may_leave;
};

class ExpertFetcher {
 public:
  // `table` has each expert's slot, kAbsent or kLoading: [num_layers, num_experts].
  ExpertFetcher(SlabReader& reader, int32_t* table, int64_t num_layers, int64_t num_experts);

  // Lends free slots, the last one first, and then, if `worth` is not null, slots of evictable experts. At most
  // `max_prefetches` may be under way more than there are now. A layer that needs more experts than
  // `max_needed` is not for this.
  void begin(std::vector<int32_t> free_slots, const Worth* worth, int64_t max_prefetches, int64_t max_needed);
  FetchJournal end();

  // Whether slots were lent.
  bool may_load() const { return !free_.empty() || may_evict_; }
  // The table with the arrived experts.
  void collect();
  // Has experts of a layer come that are absent, and cancels its other prefetches. False: that is impossible, and no
  // expert is read. They stay where they are until `end`.
  bool request(int64_t layer, const int64_t* ids, int64_t count);
  // Those of the last request that are not there yet.
  const std::vector<int32_t>& missing() const { return missing_; }
  // Waits until another of these is there. False: one of them failed, or it takes long.
  bool wait();
  // Counts the last request: its layer is computed, and its experts may leave.
  void finish();
  // Prefetches experts that a layer will probably need, the first of each token first, as far as slots suffice.
  void prefetch(int64_t layer, const int64_t* ids, int64_t num_tokens, int64_t top_k);

 private:
  int32_t& place(int32_t expert) { return table_[expert]; }
  int32_t take_slot();
  bool can_leave(int32_t expert) const;
  void pass_by(int64_t layer);
  int64_t num_slots_up_to(int64_t count) const;
  void note(FetchEvent event, int32_t expert, int64_t slot) {
    journal_.entries.push_back({event, expert, static_cast<int32_t>(slot)});
  }
  bool take_back(int32_t expert);
  void cancel_others(int64_t layer);
  void update_missing();

  SlabReader& reader_;
  int32_t* const table_;
  const int64_t num_experts_;
  std::vector<int32_t> free_;
  bool may_evict_ = false;
  // Over all experts, during the pass:
  std::vector<double> worth_, worth_used_, worth_unused_;
  std::vector<MayLeave> may_leave_;
  int64_t prefetch_room_ = 0, max_needed_ = 0;
  std::vector<int32_t> prefetches_;  // begun here, and under way
  std::vector<uint8_t> is_kept_;     // [all experts]: needed or expected by a layer that is not computed yet
  std::vector<uint8_t> has_used_;    // [all experts]: by a layer that is
  std::vector<uint8_t> is_needed_;   // [num_experts], by the last request
  std::vector<int32_t> needed_, missing_;
  bool has_failed_ = false;  // one of the last request
  int64_t late_ = 0, misses_ = 0;
  FetchJournal journal_;
};

}  // namespace moeflow

// One pool of threads for every kernel, unless a thread has its own. Workers spin briefly after a job, because in
// decode the next one follows within microseconds. They stay awake a little longer while no other thread wants their
// core, then sleep. The calling thread takes part as thread 0.
#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>

namespace moeflow {

// The context of a running job: its thread number, a barrier, and the distribution of items.
class Team;

using Job = void (*)(void* context, Team& team, int thread_idx);

class Team {
 public:
  static constexpr int kPhases = 4;

  int num_threads() const { return num_threads_; }
  // Waits until every thread of the job has arrived; their earlier writes are visible afterwards.
  void barrier();
  // Calls use(item, next) for each of `num_items` on one of the threads. All threads call this, once in each of the
  // job's phases. Neighbours belong to one thread, which so reads memory in one stream and finds its earlier results in
  // its cache. A finished thread takes items of others. `next` is its probable next item, or `num_items`. The computing
  // thread never changes an item's bits.
  template <typename Use>
  void for_each(int phase, int64_t num_items, int thread_idx, const Use& use) {
    assert(phase < kPhases);
    if (num_threads_ == 1) {
      for (int64_t item = 0; item < num_items; ++item) use(item, item + 1);
      return;
    }
    const int num_shares = this->num_shares(), sharers = (num_threads_ + num_shares - 1) / num_shares;
    for (int i = 0; i < num_shares; ++i) {
      const int share = (thread_idx + i) % num_shares;
      const int64_t first = num_items * share / num_shares, end = num_items * (share + 1) / num_shares;
      std::atomic<int64_t>& taken = shares_[share].taken[phase];
      while (first + taken.load(std::memory_order_relaxed) < end) {  // reading disturbs no other thread, taking does
        const int64_t item = first + taken.fetch_add(1, std::memory_order_relaxed);
        if (item < end) use(item, item + sharers < end ? item + sharers : num_items);
      }
    }
  }

 private:
  friend class Pool;

  // How many items of a share of each phase have been taken.
  struct alignas(64) Share {
    std::atomic<int64_t> taken[kPhases] = {};
  };
  // With one counter for all threads, each would wait for the previous one: a sixth of a microsecond between two cores
  // of a Zen 4, as long as a tile takes. With one for each of many, they would all have to be looked at in the end.
  static constexpr int kMaxShares = 8;

  int num_shares() const { return num_threads_ < kMaxShares ? num_threads_ : kMaxShares; }
  void reset() {
    for (int share = 0; share < num_shares(); ++share) {
      for (std::atomic<int64_t>& taken : shares_[share].taken) taken.store(0, std::memory_order_relaxed);
    }
  }

  int num_threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  Share shares_[kMaxShares];
};

// Runs `job` on every thread of the pool and returns when all are done. One job at a time: a second caller
// waits. Not re-entrant. A job must not throw: it is `noexcept` in effect, what can fail comes before it.
void run_on_pool(Job job, void* context);

// Sets the number of threads, the caller included; 1 means no workers. Waits for running kernels, so that the number is
// constant for the holder of the workspace. Throws std::system_error when the system does not give that many;
// then there are no workers. The child of a fork has as many threads as its parent, started with its first job.
void set_num_threads(int num_threads);
int num_threads();

// Gives the calling thread its own pool, of so many threads, and workspace, so that it computes independently of the
// threads that share one. From then on `set_num_threads` sets that one's. Both end with
// the thread. Throws like `set_num_threads`.
void use_own_threads(int num_threads);

}  // namespace moeflow

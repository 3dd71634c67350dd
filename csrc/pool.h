// One pool of threads for every kernel, unless a thread has its own. Workers spin briefly after a job, because in decode the next one
// follows within microseconds, stay awake a little longer while no other thread wants their core, then sleep until woken;
// the calling thread takes part as thread 0.
#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>

namespace moeflow {

// What a job may use while it runs: its thread number, a barrier, and shared work counters.
class Team;

using Job = void (*)(void* context, Team& team, int thread_idx);

// Hands out item numbers to whichever thread asks first. Who computes an item never changes its bits.
class WorkCounter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int64_t take(int64_t count = 1) { return next_.fetch_add(count, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

class Team {
 public:
  static constexpr int kCounters = 4;

  int num_threads() const { return num_threads_; }
  // Waits until every thread of the job has arrived; what they wrote before is visible after.
  void barrier();
  // Counter for the job's i-th phase; all are zero when the job begins.
  WorkCounter& counter(int phase) {
    assert(phase < kCounters);
    return counters_[phase];
  }

 private:
  friend class Pool;
  int num_threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  WorkCounter counters_[kCounters];
};

// Runs `job` on every thread of the pool and returns when all are done. One job at a time: a second caller
// waits. Not re-entrant. A job must not throw: it is `noexcept` in effect, what can fail comes before it.
void run_on_pool(Job job, void* context);

// Sets the number of threads, the caller included; 1 means no workers. Waits for running kernels, so that the number
// stays as it is for whoever holds the workspace. Throws std::system_error when the system does not give that many;
// then there are no workers. The child of a fork has as many threads as its parent, started with its first job.
void set_num_threads(int num_threads);
int num_threads();

// Gives the calling thread a pool of its own, of so many threads, and a workspace, so that it computes beside the
// threads that share one and neither waits for the other. From then on `set_num_threads` sets that one's. Both end with
// the thread. Throws like `set_num_threads`.
void use_own_threads(int num_threads);

}  // namespace moeflow

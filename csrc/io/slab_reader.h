// Reads slabs of a file into slots by threads of its own: what somebody waits for before what may be needed. Whoever
// waits helps. Everything may be called by any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

namespace moeflow {

// Slabs are not cut into smaller pieces, which brought nothing.
constexpr int64_t kMinPieceBytes = 1024 * 1024;
constexpr int64_t kSlabPageBytes = 4096;  // what direct reads want offsets and lengths to be multiples of

// Slabs in a file, which stays open as long as its reader: slabs of a layer are consecutive, each padded to whole
// pages.
struct SlabFile {
  int descriptor;
  bool is_direct;  // reads go past the page cache; otherwise pages are given back to it
  const int64_t* layer_starts;  // [num_layers]: where a layer's slabs begin
  const int64_t* layer_bytes;   // [num_layers]: of each of them, without the filling
  int64_t num_layers, slabs_per_layer;
  const uint32_t* checksums;  // CRC-32 of all slabs, compared at a slab's first read; null: not at all

  int64_t num_slabs() const { return num_layers * slabs_per_layer; }
  int64_t slab_bytes(int64_t slab) const { return layer_bytes[slab / slabs_per_layer]; }
  int64_t filled_bytes(int64_t slab) const {
    return (slab_bytes(slab) + kSlabPageBytes - 1) / kSlabPageBytes * kSlabPageBytes;
  }
  int64_t position(int64_t slab) const {
    return layer_starts[slab / slabs_per_layer] + slab % slabs_per_layer * filled_bytes(slab);
  }
};

// A slab whose read has ended. One that is not right was not read completely, or is damaged.
struct EndedRead {
  int64_t slab, slot;
  bool is_right;
};

// What one thread read when, in nanoseconds of the steady clock.
struct ReadSpan {
  int thread;  // or the number of threads: somebody who waited
  int64_t slab, num_bytes;
  bool is_urgent;
  int64_t start_ns, end_ns;
};

class SlabReader {
 public:
  // Slots lie one behind the other from `memory` on. Without threads only waiting callers read. Throws
  // std::system_error if the system does not give that many.
  SlabReader(const SlabFile& file, uint8_t* memory, int64_t slot_bytes, int num_threads);
  ~SlabReader();
  SlabReader(const SlabReader&) = delete;
  SlabReader& operator=(const SlabReader&) = delete;

  // Queues the reads of some slabs that are not being read yet. Few that somebody waits for are cut into pieces. A
  // caller that waits at once reads one of them itself, without waking a thread.
  void submit(const std::vector<std::tuple<int64_t, int64_t>>& slabs_and_slots, bool is_urgent, bool waits_at_once);
  // Takes a slab back whose read has not begun. Returns whether that was so: then it is not heard of again.
  bool cancel(int64_t slab);
  // Likewise, but nothing that somebody waits for.
  bool cancel_prefetch(int64_t slab);
  int64_t slot_of(int64_t slab) const { return loads_[slab].slot; }

  bool has_ended() const { return num_ended_.load(std::memory_order_acquire) > 0; }
  std::vector<EndedRead> take_ended();
  // Waits until a read has ended that was not taken, or was taken by another caller. False: not in so long.
  bool wait(double seconds);
  // Whether spans of reads are logged, from now on. Those so far are dropped with the log.
  void keep_spans(bool keeps);
  bool keeps_spans() const { return keeps_spans_.load(std::memory_order_relaxed); }
  std::vector<ReadSpan> take_spans();

  // Ends the threads, after the reads that have begun; all others have ended with that, and are not right.
  void close();
  bool is_closed();

 private:
  struct Load {
    int64_t slot = 0;
    int num_pieces = 0;  // still to end; 0: it is not being read
    bool is_urgent = false, has_begun = false, is_right = true;
  };
  struct Piece {
    int64_t slab, start, num_bytes;
  };
  using Place = std::tuple<int64_t, int64_t>;  // in the queue: 0 or after prefetches of lower layers; order of coming

  using Lock = std::unique_lock<std::mutex>;

  void serve(int thread);
  void queue(int64_t slab, int64_t slot, bool is_urgent, int64_t max_pieces);
  bool take_back(int64_t slab, bool may_be_urgent);
  void read_first(Lock& lock, int thread);
  void end_pieces(Lock& lock, int64_t slab, int count, bool is_right);
  bool read_piece(const Piece& piece, int64_t slot) const;
  // Whether there is a read for a waiting caller: an urgent one, or without threads any.
  bool can_help() const { return !queue_.empty() && (num_threads_ == 0 || std::get<0>(queue_.begin()->first) == 0); }

  const SlabFile file_;
  uint8_t* const memory_;
  const int64_t slot_bytes_;
  std::atomic<bool> keeps_spans_{false};
  std::mutex mutex_;
  std::condition_variable work_, ended_one_;
  std::map<Place, Piece> queue_;
  int64_t num_queued_ = 0;  // ever
  std::vector<Load> loads_;
  std::vector<uint8_t> is_checked_;
  std::vector<EndedRead> ended_;
  std::atomic<int64_t> num_ended_{0};   // in `ended_`
  std::atomic<uint64_t> num_taken_{0};  // times that somebody took some
  std::vector<ReadSpan> spans_;
  std::vector<std::thread> threads_;
  int num_threads_ = 0;
  bool is_closed_ = false;
};

}  // namespace moeflow

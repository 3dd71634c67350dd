// Collectives between processes ("ranks") through a segment of memory that all of them map. Knows bytes and ranks:
// tensors, deadlines and processes that have ended are the callers' business. For Linux, whose futexes it sleeps on.
//
// In a collective each rank contributes a stream of bytes. Every other rank takes an interval: all of it, or its own
// part. A stream that is longer than a rank's buffer goes in pieces. For each piece:
//
//   start() or advance()   copies the piece into one of the rank's two buffers and publishes it: the rank's epoch grows
//   wait()                 until all have published theirs; the only wait
//   advance()              copies what the others have for this rank out of their buffers
//
// Why one wait is enough. A rank publishes epoch e + 2, in the buffer of e, only after all have published e + 1. Each
// rank publishes e + 1 only after reading its part of e. So no rank reads e any more.
// For the same reason epochs of two ranks differ by 1 at most, and they may wrap.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moeflow {

constexpr int kMaxRanks = 64;

// Bytes of a segment, with two buffers of at least `buffer_bytes` for each rank.
// Throws std::invalid_argument if the ranks are fewer than 1 or more than kMaxRanks, or the buffers are empty.
int64_t segment_bytes(int num_ranks, int64_t buffer_bytes);

// Makes a segment of memory that is zero, before any rank uses it.
void make_segment(void* memory, int num_ranks, int64_t buffer_bytes);

struct Segment;
struct RankState;

struct Part {
  const void* data;
  int64_t bytes;
};

// An interval of a stream.
struct Interval {
  int64_t begin, bytes;
};

// One rank's view. One collective at a time, of one thread; only `abort` may be called concurrently.
class SharedGroup {
 public:
  enum class State { kWaiting, kComplete, kMismatch, kAborted };

  // `memory` is aligned to 64 bytes and outlives this. Throws std::invalid_argument if it is no segment with this rank.
  SharedGroup(void* memory, int rank);

  int num_ranks() const;

  // Begins a collective: every rank takes all parts, or rank i takes the i-th. `label` names it; all ranks must use the
  // same. The parts stay where they are until the collective is over.
  void start(const std::string& label, std::vector<Part> parts, bool is_for_all);

  // Waits until every rank has published this piece, or the group is aborted, at most so long.
  State wait(double seconds);

  // The ranks that have not published this piece.
  std::vector<int> missing() const;
  // What a rank that is not missing said in `start`, cut if long.
  std::string label_of(int rank) const;
  // After `wait`: how many bytes each rank has for this one; 0 for itself.
  std::vector<int64_t> incoming_bytes() const;

  // Takes the piece: outs[r] is where all bytes of rank r go, in every call. True if another piece follows, for which
  // to wait.
  bool advance(const std::vector<void*>& outs);

  // Ends the group: waits of all ranks return at once, now and later. The first reason stays.
  void abort(const std::string& reason);
  std::string abort_reason() const;

 private:
  bool has_published(int rank) const;
  bool is_aborted() const;
  bool wait_for(int rank, int* spins, int64_t deadline_ns);
  bool take_messages();
  uint8_t* buffer(int rank) const;
  void publish_piece();
  void write_piece();

  Segment* const segment_;
  const int rank_;
  uint32_t epoch_;                  // of the piece under way, and before it of the last one
  std::vector<Part> parts_;         // of the stream of this rank
  std::vector<Interval> incoming_;  // of the stream of each rank: what this one takes
  int64_t piece_ = 0, num_pieces_ = 0;
};

}  // namespace moeflow

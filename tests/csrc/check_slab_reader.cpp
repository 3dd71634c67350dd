// Reads of csrc/io/slab_reader.h and passes of csrc/io/expert_fetcher.h over a real file, by several threads at once.
// Slabs are damaged or missing, reads are cancelled, and readers close early. scripts/sanitize builds it; tests/experts
// has them under the cache.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/io/crc32.h"
#include "../../csrc/io/expert_fetcher.h"
#include "../../csrc/ops/ops.h"
#include "../../csrc/io/slab_reader.h"

using namespace moeflow;

namespace {

constexpr int64_t kPage = 4096, kLayers = 4, kExperts = 6, kSlabs = kLayers * kExperts;
constexpr int64_t kLayerBytes[kLayers] = {2 * kPage - 100, kPage, 2 * kPage - 100, kPage / 2};
constexpr int64_t kLayerStarts[kLayers] = {kPage, 13 * kPage, 19 * kPage, 31 * kPage};  // of 6 slabs, of whole pages
constexpr int64_t kDamaged = 7, kMissing = kSlabs - 1;  // the last one is cut off

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  std::fprintf(stderr, "check_slab_reader: %s is wrong\n", what.c_str());
  std::exit(1);
}

uint8_t byte_of(int64_t slab, int64_t at) { return static_cast<uint8_t>(slab * 37 + at * 11 + at / 251); }

// A file of slabs, gone from the folder as soon as it is open, and memory for some of them.
class Disk {
 public:
  explicit Disk(int64_t num_slots, bool is_whole = true) : memory(num_slots * 2 * kPage), num_slots(num_slots) {
    char name[] = "slabs.XXXXXX";
    descriptor_ = mkstemp(name);
    expect(descriptor_ >= 0, "a file");
    unlink(name);
    std::vector<uint8_t> slab(2 * kPage);
    expect(write(descriptor_, slab.data(), kPage) == kPage, "what comes before slabs");
    for (int64_t number = 0; number < kSlabs - (is_whole ? 0 : 1); ++number) {
      const int64_t num_bytes = kLayerBytes[number / kExperts], filled = num_bytes > kPage ? 2 * kPage : kPage;
      for (int64_t at = 0; at < num_bytes; ++at) slab[at] = byte_of(number, at);
      checksums_.push_back(crc32(slab.data(), num_bytes));
      if (!is_whole && number == kDamaged) slab[5] ^= 1;
      expect(write(descriptor_, slab.data(), filled) == filled, "a write");
    }
    checksums_.resize(kSlabs);
  }
  ~Disk() { close(descriptor_); }
  SlabFile file() const {
    return {descriptor_, false, kLayerStarts, kLayerBytes, kLayers, kExperts, checksums_.data()};
  }
  bool has(int64_t slab, int64_t slot) const {
    const uint8_t* const content = memory.data() + slot * 2 * kPage;
    for (int64_t at = 0; at < kLayerBytes[slab / kExperts]; ++at) {
      if (content[at] != byte_of(slab, at)) return false;
    }
    return true;
  }
  std::vector<uint8_t> memory;
  const int64_t num_slots;

 private:
  int descriptor_;
  std::vector<uint32_t> checksums_;
};

bool can_be_read(int64_t slab) { return slab != kDamaged && slab != kMissing; }

// Each slab has its own slot. A read that was not cancelled ends once, with the right bytes.
void check_reads(int num_threads, unsigned seed) {
  Disk disk(kSlabs, false);
  SlabReader reader(disk.file(), disk.memory.data(), 2 * kPage, num_threads);
  reader.keep_spans(true);
  std::mt19937 chance(seed);
  std::set<int64_t> under_way;
  for (int step = 0; step < 300; ++step) {
    const int64_t slab = chance() % kSlabs;
    if (under_way.count(slab) != 0) {
      if (chance() % 2 == 0 ? reader.cancel(slab) : reader.cancel_prefetch(slab)) under_way.erase(slab);
    } else {
      reader.submit({{slab, slab}}, chance() % 2 == 0, false);
      under_way.insert(slab);
    }
    if (chance() % 4 != 0 || under_way.empty()) continue;
    expect(reader.wait(60), "a wait");
    for (const EndedRead& read : reader.take_ended()) {
      expect(under_way.erase(read.slab) == 1, "what ended");
      expect(read.is_right == can_be_read(read.slab), "what is right");
      if (read.is_right) expect(disk.has(read.slab, read.slot), "what was read");
    }
  }
  reader.close();
  for (const EndedRead& read : reader.take_ended()) expect(under_way.erase(read.slab) == 1, "what ended in the end");
  expect(under_way.empty(), "what never ended");
  for (const ReadSpan& span : reader.take_spans()) expect(span.start_ns <= span.end_ns, "a span");
  reader.submit({{0, 0}, {1, 1}}, true, true);
  expect(reader.take_ended().size() == 2, "reads after closing");
}

// Threads that submit and wait at once, each its own slabs; another one closes in the end.
void check_many_users(int num_threads) {
  Disk disk(kSlabs);
  SlabReader reader(disk.file(), disk.memory.data(), 2 * kPage, num_threads);
  std::atomic<int64_t> num_ended{0}, num_right{0};
  std::vector<std::thread> users;
  constexpr int kUsers = 4, kRounds = 20;
  for (int user = 0; user < kUsers; ++user) {
    users.emplace_back([&, user] {
      for (int round = 0; round < kRounds; ++round) {
        reader.submit({{user, user}}, user % 2 == 0, user == 0);
        while (num_ended.load() < (round + 1) * kUsers) {  // all are at the same round
          reader.wait(0.01);
          for (const EndedRead& read : reader.take_ended()) {
            num_right += disk.has(read.slab, read.slot);
            ++num_ended;
          }
        }
      }
    });
  }
  for (std::thread& thread : users) thread.join();
  expect(num_right.load() == kUsers * kRounds, "what users read");
  for (int64_t slab = 0; slab < kSlabs; ++slab) reader.submit({{slab, slab}}, slab % 2 == 0, false);
}  // closes with reads under way

// The state of a cache: each slot's expert, according to the journal.
class Records {
 public:
  explicit Records(int64_t num_slots) {
    for (int64_t slot = num_slots; slot > 0; --slot) free.push_back(static_cast<int32_t>(slot - 1));
  }
  void replay(const FetchJournal& journal) {
    for (const FetchEntry& it : journal.entries) {
      if (it.event == FetchEvent::kEvicted || it.event == FetchEvent::kRetired) {
        expect(slots.at(it.expert) == it.slot && slots.erase(it.expert) == 1, "an eviction");
        free.push_back(it.slot);
      } else if (it.event == FetchEvent::kLoading || it.event == FetchEvent::kPrefetching) {
        const auto found = std::find(free.begin(), free.end(), it.slot);
        expect(found != free.end() && slots.count(it.expert) == 0, "a slot");
        free.erase(found);
        loading[it.expert] = it.slot;
      } else if (it.event == FetchEvent::kJoined) {
        expect(loading.at(it.expert) == it.slot, "what was joined");
      } else {
        expect(loading.at(it.expert) == it.slot && loading.erase(it.expert) == 1, "an end");
        if (it.event == FetchEvent::kArrived) slots[it.expert] = it.slot;
        if (it.event != FetchEvent::kArrived) free.push_back(it.slot);
        expect((it.event != FetchEvent::kFailed) || !can_be_read(it.expert), "a failure");
      }
    }
  }
  std::vector<int32_t> free;
  std::map<int32_t, int32_t> slots, loading;
};

// Passes over layers with experts at random, prefetches at random, and slots that are too few now and then.
void check_passes(int num_threads, int64_t num_slots, unsigned seed) {
  Disk disk(num_slots, false);
  SlabReader reader(disk.file(), disk.memory.data(), 2 * kPage, num_threads);
  const bool keeps_spans = seed % 2 == 0;
  reader.keep_spans(keeps_spans);
  std::vector<int32_t> table(kSlabs, kAbsent);
  ExpertFetcher fetcher(reader, table.data(), kLayers, kExperts);
  Records records(num_slots);
  std::mt19937 chance(seed);
  int64_t num_finished = 0, num_waits = 0;
  for (int pass = 0; pass < 60; ++pass) {
    std::vector<double> values[3];
    for (std::vector<double>& of_all : values) {
      for (int64_t expert = 0; expert < kSlabs; ++expert) of_all.push_back(static_cast<double>(chance() % 9));
    }
    std::vector<MayLeave> may_leave;
    const bool stay_some = chance() % 4 == 0;
    for (int64_t expert = 0; expert < kSlabs; ++expert) {
      const MayLeave now_or_behind = chance() % 2 == 0 ? MayLeave::kNow : MayLeave::kBehind;
      may_leave.push_back(stay_some && chance() % 2 == 0 ? MayLeave::kNever : now_or_behind);
    }
    const Worth worth{values[0].data(), values[1].data(), values[2].data(), may_leave.data()};
    fetcher.begin(records.free, &worth, 2, kExperts - 1);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const auto any = [&] { return static_cast<int64_t>(chance() % kExperts); };
      const int64_t ids[4] = {any(), any(), any(), any()};
      if (!fetcher.request(layer, ids, 4)) break;
      if (layer + 1 < kLayers) {
        const int64_t ahead[2] = {any(), any()};
        fetcher.prefetch(layer + 1, ahead, 1, 2);
      }
      const bool may_fail = std::any_of(ids, ids + 4, [&](int64_t id) { return !can_be_read(layer * kExperts + id); });
      // On a busy machine a read may take longer than a call waits.
      int calls_left = 1000;
      bool is_there = true;
      while (is_there && !fetcher.missing().empty()) is_there = fetcher.wait() || (!may_fail && --calls_left > 0);
      expect(is_there || may_fail, "a layer that failed");
      if (!is_there) break;
      for (const int64_t id : ids) {
        const int64_t expert = layer * kExperts + id;
        expect(table[expert] >= 0 && disk.has(expert, table[expert]), "an expert");
      }
      fetcher.finish();
      ++num_finished;
    }
    const FetchJournal journal = fetcher.end();
    int64_t until_ns = 0;
    for (const FetchWait& wait : journal.waits) {
      expect(until_ns <= wait.start_ns && wait.start_ns <= wait.end_ns, "the order of waits");
      expect(wait.layer >= 0 && wait.layer < kLayers, "the layer of a wait");
      until_ns = wait.end_ns;
    }
    expect(keeps_spans || journal.waits.empty(), "waits that nobody asked for");
    num_waits += static_cast<int64_t>(journal.waits.size());
    records.replay(journal);
    for (int32_t expert = 0; expert < kSlabs; ++expert) {
      const auto found = records.slots.find(expert);
      expect(found == records.slots.end() ? table[expert] < 0 : table[expert] == found->second, "the table");
      expect((table[expert] == kLoading) == (records.loading.count(expert) == 1), "what is on its way");
    }
    expect(static_cast<int64_t>(records.free.size() + records.slots.size() + records.loading.size()) == num_slots,
           "the number of slots");
    while (chance() % 4 != 0 && !records.loading.empty()) {  // between passes somebody else waits
      expect(reader.wait(60), "a wait between passes");
      for (const EndedRead& read : reader.take_ended()) {
        const int32_t expert = static_cast<int32_t>(read.slab), slot = static_cast<int32_t>(read.slot);
        records.replay({{{read.is_right ? FetchEvent::kArrived : FetchEvent::kFailed, expert, slot}}});
        table[expert] = read.is_right ? slot : kAbsent;
      }
    }
  }
  expect(num_finished > 30, "how far passes come");
  expect((num_waits > 0) == keeps_spans, "whether waits are noted");
}

}  // namespace

int main() {
  for (const int num_threads : {0, 1, 4}) {
    for (unsigned seed = 0; seed < 5; ++seed) {
      check_reads(num_threads, seed);
      for (const int64_t num_slots : {5, 9, 24}) check_passes(num_threads, num_slots, seed);
    }
    if (num_threads > 0) check_many_users(num_threads);
  }
  std::printf("slab reader: right\n");
}

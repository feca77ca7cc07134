// Writes the trace of one peer as Chrome-trace JSON, in the array form: viewers take it without its
// closing bracket, which a killed process does not write.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/peer/trace.h"

namespace pccl::node {

// Times are microseconds of this host's monotonic clock. For `pccl trace merge` a file begins with
// an event "pccl" that has the peer's id and group, the host's boot, and both clocks, and an event
// "pccl run" with the run's id comes before its first epoch. *any thread*
class TraceWriter {
 public:
  // Makes the folder and the file `<peer>.json`, and starts a thread that writes.
  [[nodiscard]] static Result<std::unique_ptr<TraceWriter>> open(const std::string& folder,
                                                                 std::uint64_t max_bytes,
                                                                 const PeerId& peer,
                                                                 std::uint32_t group,
                                                                 const std::string& name);
  ~TraceWriter();  // writes what is left
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Holds a lock for a moment, and writes nothing. Events are dropped, and counted, while too many
  // wait for the disk, and after the limit of bytes.
  void add(std::vector<peer::TraceEvent> events);

 private:
  TraceWriter(int file, std::uint64_t max_bytes, const PeerId& peer, std::uint32_t group,
              const std::string& name);
  void run();
  void write(const std::vector<peer::TraceEvent>& events, std::uint64_t dropped);

  // -- called by the thread
  void put(const peer::TracedCall& call);
  void put(const peer::TracedFlow& flow);
  void put(const peer::TracedEpoch& epoch);
  void moment(Instant at, std::string_view name, std::string_view text);
  // The arguments and two braces follow.
  void begin_span(std::string_view name, int lane, Instant begin, Instant end);
  [[nodiscard]] int lane_of(Instant begin, Instant end);
  [[nodiscard]] int lane_of(const PeerId& peer, bool sent);
  void name_lane(int lane, const std::string& name);
  void flush();

  const int file_;
  const std::uint64_t max_bytes_;
  const std::string pid_;      // of this peer's events
  std::string text_;           // to be written
  std::uint64_t written_ = 0;  // bytes, of whole events
  bool full_ = false;
  std::vector<Instant> call_lanes_;  // when the last call of each ended
  std::map<std::pair<PeerId, bool>, int> link_lanes_;
  std::map<PeerId, std::string> names_;  // of all members so far
  std::uint64_t run_ = 0;                // 0: not told yet

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::vector<peer::TraceEvent> queue_;
  std::uint64_t dropped_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace pccl::node

// The latest lines of the master's log, for the status of the run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "pccl/master/surroundings.h"
#include "pccl/wire/status.h"

namespace pccl::master {

// *one thread: the master's*
class EventLog {
 public:
  static constexpr std::size_t kLines = 256;
  static constexpr std::size_t kBytes = 512;  // of one line

  void add(const LogLine& line, Instant now) {
    lines_.push_back({now, line});
    lines_.back().line.text.resize(std::min(line.text.size(), kBytes));
    if (lines_.size() > kLines) lines_.pop_front();
  }
  // The latest last.
  [[nodiscard]] std::vector<wire::EventStatus> status(Instant now) const;

 private:
  struct Event {
    Instant at{};
    LogLine line;
  };
  std::deque<Event> lines_;
};

}  // namespace pccl::master

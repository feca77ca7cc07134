// The surroundings of a group that a test drives alone.
#pragma once

#include <cstdint>

#include "pccl/master/surroundings.h"

namespace pccl::tests {

// Ignores everything.
class Nobody : public master::Surroundings {
 public:
  void send(master::ConnectionId, std::uint64_t, const wire::Message&) override {}
  void close(master::ConnectionId) override {}
  void log(master::LogLine) override {}
  wire::Census census() override { return {}; }
  std::uint64_t next_join_ordinal() override { return ++joined_; }

 private:
  std::uint64_t joined_ = 0;
};

}  // namespace pccl::tests

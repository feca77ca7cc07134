// The congestion control of the connections between hosts.
#pragma once

#include <string>
#include <utility>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl::io {

// Chooses for each connection. BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control",
// ACM Queue 14(5), 2016) does not take each lost packet for congestion, and does not begin slowly
// after a pause. *any thread*
class Congestion {
 public:
  // PCCL_TCP_CONGESTION: a name for all connections, or kSystems. Empty: BBR for long paths, if the
  // kernel has it and lets this process use it.
  [[nodiscard]] static Result<Congestion> make(const std::string& setting);

  // REQUIRES: the connection is established.
  void choose(int descriptor) const;

  // Long paths have a congestion control that paces packets by the rate that it has measured. Many
  // connections beside each other measure worse.
  [[nodiscard]] bool paces() const;
  // Empty: all connections have the system's.
  [[nodiscard]] const std::string& name() const { return name_; }

  static constexpr const char* kSystems = "system";

 private:
  Congestion(std::string name, Duration shortest) : name_(std::move(name)), shortest_(shortest) {}

  std::string name_;   // empty: the system's
  Duration shortest_;  // round trip of the connections that it is for
};

}  // namespace pccl::io

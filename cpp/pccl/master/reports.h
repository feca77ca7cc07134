// Whether the reports of returning members are consistent. A master that takes over cannot check
// whether they are true, and passes them on to the other members.
#pragma once

#include <string>
#include <vector>

#include "pccl/master/limits.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

[[nodiscard]] bool plausible(const wire::EpochRecord& record, const Options& options);
[[nodiscard]] Status check(const wire::Rejoin& rejoin, const Options& options);
// A complete log: consecutive entries up to the last one applied.
[[nodiscard]] Status check_log(const wire::Rejoin& rejoin, const std::vector<wire::LogEntry>& log,
                               const Options& options);
// The name that messages show. REQUIRES: the record is plausible; otherwise names may be anything.
[[nodiscard]] std::string name_of(const wire::Rejoin& rejoin);
// The error of an inconsistent report. `detail`: ": " and the details, or empty.
[[nodiscard]] Status wrong_report(const std::string& who, const std::string& detail = {});

}  // namespace pccl::master

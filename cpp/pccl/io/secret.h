// The run's secret, and the keys derived from it. It is never printed, and its memory is wiped.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl::io {

// 256 bits, wiped by the destructor.
class Key {
 public:
  Key() = default;
  ~Key();
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  std::array<std::uint8_t, 32> bytes{};
};

// Bytes that only the members of a run know. Holds a hash of them. *immutable*
class Secret {
 public:
  Secret() = default;  // none
  // invalid_argument: too few or too uniform bytes. `name`: their source, for the error.
  [[nodiscard]] static Result<Secret> from(std::string_view bytes, const std::string& name);
  // PCCL_SECRET, or the content of the file PCCL_SECRET_FILE, without blanks around it; none if
  // neither is set; an error if one is empty. REQUIRES: no other thread changes the environment.
  [[nodiscard]] static Result<Secret> from_environment();
  [[nodiscard]] static Result<Secret> from_file(const std::string& path, const std::string& name);

  explicit operator bool() const { return root_ != nullptr; }

  // -- REQUIRES: operator bool. docs/internals/protocol.md has the derivation.
  // For connections between peers and their master.
  [[nodiscard]] Key control_key() const;
  // For connections to the peer `to`, in this run.
  [[nodiscard]] Key link_key(std::uint64_t run, const PeerId& to) const;
  // Made of a peer's memory key; peers of one host prove to each other that they know it.
  [[nodiscard]] HostKey host_key(const MemoryKey& memory_key) const;
  // For readers of the master's status over HTTP. They cannot join with it.
  [[nodiscard]] Key status_key() const;

 private:
  [[nodiscard]] Key derive(const std::string& label) const;
  std::shared_ptr<const Key> root_;
};

}  // namespace pccl::io

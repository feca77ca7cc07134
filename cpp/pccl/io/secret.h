// The run's secret, and the keys that are made of it. Nothing of it is ever printed, and what holds
// it is wiped when it is dropped.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl::io {

// 256 bits, wiped at the end.
class Key {
 public:
  Key() = default;
  ~Key();
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  std::array<std::uint8_t, 32> bytes{};
};

// Bytes that all of a run know and nobody else. What is kept is a hash of them. *immutable*
class Secret {
 public:
  Secret() = default;  // none
  // invalid_argument when they are too few or too much alike; `name` says where they are from.
  [[nodiscard]] static Result<Secret> from(std::string_view bytes, const std::string& name);
  // PCCL_SECRET, or what is in the file PCCL_SECRET_FILE, without blanks; none when neither is set;
  // an error when one is empty. Not to be called while another thread changes the environment.
  [[nodiscard]] static Result<Secret> from_environment();
  [[nodiscard]] static Result<Secret> from_file(const std::string& path, const std::string& name);

  explicit operator bool() const { return root_ != nullptr; }

  // -- REQUIRES: there is one. docs/protocol.md has the derivation.
  // Between peers and their master.
  [[nodiscard]] Key control_key() const;
  // For connections to this one peer, in this run.
  [[nodiscard]] Key link_key(std::uint64_t run, const PeerId& to) const;
  // What a peer's word becomes: peers of one host prove to each other that they know that.
  [[nodiscard]] PeerId host_word(const PeerId& word) const;

 private:
  [[nodiscard]] Key derive(const std::string& label) const;
  std::shared_ptr<const Key> root_;
};

}  // namespace pccl::io

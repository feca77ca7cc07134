#include "pccl/io/secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "pccl/base/fork.h"
#include "pccl/base/text.h"
#include "pccl/io/socket.h"
#include "pccl/wire/codec.h"

namespace pccl::io {
namespace {

constexpr std::size_t kLeastBytes = 32;  // 128 bits where they are hexadecimal digits
constexpr std::size_t kMostBytes = 4096;
constexpr std::size_t kLeastDifferent = 8;

Error refuse(std::string sentence) { return {Code::invalid_argument, std::move(sentence)}; }

Key hmac(std::string_view key, std::string_view text) {
  Key made;
  unsigned size = 0;
  const auto* done = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          made.bytes.data(), &size);
  // Never return a key of zeros.
  if (done == nullptr || size != made.bytes.size()) throw std::runtime_error("HMAC-SHA256 failed");
  return made;
}

std::optional<std::string_view> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

// An empty variable is an error: a program that should have read the secret has failed.
Error refuse_empty(const std::string& name) {
  return refuse(name + " is set, but empty: unset it, if the run has no secret");
}

}  // namespace

Key::~Key() { OPENSSL_cleanse(bytes.data(), bytes.size()); }

Result<Secret> Secret::from(std::string_view bytes, const std::string& name) {
  const std::string advice = "; `pccl secret` makes a good one";
  if (bytes.size() < kLeastBytes) {
    return refuse(name + " is too short: " + std::to_string(bytes.size()) + " bytes, at least " +
                  std::to_string(kLeastBytes) + " are needed" + advice);
  }
  if (bytes.size() > kMostBytes)
    return refuse(name + " is longer than " + std::to_string(kMostBytes) + " bytes" + advice);
  if (std::set<char>(bytes.begin(), bytes.end()).size() < kLeastDifferent)
    return refuse(name + " repeats itself: it could be guessed" + advice);
  Secret made;
  made.root_ = std::make_shared<const Key>(hmac("pccl secret", bytes));
  return made;
}

Result<Secret> Secret::from_file(const std::string& path, const std::string& name) {
  const int file = open_descriptor([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  if (file < 0) return refuse(name + ": cannot read " + path + ": " + error_text(errno));
  std::array<char, kMostBytes + 2> read{};
  std::size_t size = 0;
  ssize_t got = 0;
  while (size < read.size()) {
    got = ::read(file, read.data() + size, read.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
  }
  const int number = errno;
  close_descriptor(file);
  auto made =
      got < 0 ? Result<Secret>(refuse(name + ": cannot read " + path + ": " + error_text(number)))
              : from(trim({read.data(), size}), "the secret in " + path);
  OPENSSL_cleanse(read.data(), read.size());
  return made;
}

Result<Secret> Secret::from_environment() {
  const std::optional<std::string_view> text = variable("PCCL_SECRET");
  const std::optional<std::string_view> path = variable("PCCL_SECRET_FILE");
  if (text && text->empty()) return refuse_empty("PCCL_SECRET");
  if (path && path->empty()) return refuse_empty("PCCL_SECRET_FILE");
  if (text && path)
    return refuse("both PCCL_SECRET and PCCL_SECRET_FILE are set: which one counts?");
  if (path) return from_file(std::string(*path), "PCCL_SECRET_FILE");
  if (text) return from(trim(*text), "PCCL_SECRET");
  return Secret();
}

// HKDF-Expand of 32 bytes (RFC 5869); the root is the output of HKDF-Extract.
Key Secret::derive(const std::string& label) const {
  const std::string info = "pccl " + std::to_string(wire::kProtocolVersion) + " " + label + '\x01';
  return hmac({reinterpret_cast<const char*>(root_->bytes.data()), root_->bytes.size()}, info);
}

Key Secret::control_key() const { return derive("control"); }

Key Secret::link_key(std::uint64_t run, const PeerId& to) const {
  std::string label = "link";
  for (unsigned i = 0; i < 8; ++i) label += static_cast<char>(run >> (8 * i));
  label.append(reinterpret_cast<const char*>(to.bytes.data()), to.bytes.size());
  return derive(label);
}

HostKey Secret::host_key(const MemoryKey& memory_key) const {
  std::string label = "host";
  label.append(reinterpret_cast<const char*>(memory_key.bytes.data()), memory_key.bytes.size());
  const Key key = derive(label);
  HostKey made;
  std::memcpy(made.bytes.data(), key.bytes.data(), made.bytes.size());
  return made;
}

Key Secret::status_key() const { return derive("status"); }

}  // namespace pccl::io

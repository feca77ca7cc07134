// TLS 1.3 with a key that both ends have (an external PSK), over a non-blocking descriptor. OpenSSL
// does the cryptography. This file reads and writes, with several records in a system call.
// docs/guide/security.md explains the options.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/settings.h"
#include "pccl/io/secret.h"

// Of OpenSSL, whose headers only tls.cpp includes.
struct bio_method_st;
struct ssl_ctx_st;
struct ssl_session_st;
struct ssl_st;

namespace pccl::io {

class Tls;
struct TlsScratch;

// Checks the unencrypted messages at the beginning of a TLS connection. OpenSSL allocates a message
// as soon as its length is announced, 128 KiB for a ClientHello, before the client has proved
// anything.
class PlainMessages {
 public:
  // False: a message is announced that is longer than any version of pccl sends.
  [[nodiscard]] bool admit(std::span<const std::uint8_t> bytes);

 private:
  std::array<std::uint8_t, 5> record_{};  // its header
  std::size_t record_filled_ = 0;
  std::size_t record_left_ = 0;
  std::array<std::uint8_t, 4> message_{};  // its header
  std::size_t message_filled_ = 0;
  std::size_t message_left_ = 0;
};

// The purpose of a connection. Keys and names of one kind are invalid for the other.
enum class TlsRole : std::uint8_t { control, link };

struct TlsOptions {
  explicit TlsOptions(const Settings& settings);

  bool aes_first;                    // of the two ciphers that are offered and accepted
  std::uint64_t key_update_records;  // a sender changes its key after so many records
};

// Shared by the connections of one owner. Ends are made by the thread that drives the loop. Others
// may use different ends at the same time.
class TlsContext : public std::enable_shared_from_this<TlsContext> {
 public:
  [[nodiscard]] static Result<std::shared_ptr<TlsContext>> make(const TlsOptions& options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // The end that connected, and the end that accepted.
  [[nodiscard]] std::unique_ptr<Tls> client(TlsRole role, const Key& key);
  [[nodiscard]] std::unique_ptr<Tls> server(TlsRole role, const Key& key);

 private:
  friend class Tls;
  friend struct TlsCallbacks;
  explicit TlsContext(const TlsOptions& options);
  [[nodiscard]] std::unique_ptr<Tls> make_end(TlsRole role, const Key& key, bool client);

  ssl_ctx_st* context_ = nullptr;
  bio_method_st* method_ = nullptr;
  const TlsOptions options_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<TlsScratch>> scratch_;  // not in use
};

// One end of one connection. *one thread at a time*
class Tls {
 public:
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Continues the handshake as far as possible. authentication_failed: the other end does not know
  // the key, or does not speak TLS; unreachable: the connection has ended. The reason is a
  // predicate about the other end, as in "does not know the secret".
  Status shake(int descriptor);
  [[nodiscard]] bool established() const { return established_; }
  // After a failure: the first bytes were an unencrypted control message.
  [[nodiscard]] bool met_plain_peer() const { return met_plain_peer_; }

  // -- REQUIRES: established. As Socket::read and Socket::write; -EBADMSG: bytes came that the
  // other end's TLS did not make. Bytes that write has taken may still be `unsent`.
  [[nodiscard]] ssize_t read(int descriptor, std::span<const iovec> into);
  [[nodiscard]] ssize_t write(int descriptor, std::span<const iovec> from);

  // There is something to read, even if no more bytes come.
  [[nodiscard]] bool buffered() const;
  // The descriptor has not taken all bytes: write, even nothing, when it is writable.
  [[nodiscard]] bool unsent() const { return unsent_at_ < unsent_.size(); }

 private:
  friend class TlsContext;
  friend struct TlsCallbacks;
  class Use;
  Tls(std::shared_ptr<TlsContext> context, TlsRole role, const Key& key, bool client);

  [[nodiscard]] ssize_t fill(int descriptor, std::size_t wanted);
  void keep_rest();
  [[nodiscard]] ssize_t flush(int descriptor);
  [[nodiscard]] bool encrypt(const void* data, std::size_t size);
  [[nodiscard]] Status failure(int error);
  [[nodiscard]] Status check_peer();
  [[nodiscard]] ssl_session_st* session() const;
  [[nodiscard]] std::string identity() const;

  std::shared_ptr<TlsContext> context_;
  ssl_st* ssl_ = nullptr;
  const TlsRole role_;
  const bool client_;
  std::unique_ptr<Key> key_;  // until it is established
  const std::string identity_;
  bool established_ = false;
  bool met_plain_peer_ = false;
  std::array<std::uint8_t, 4> first_{};  // the first bytes that came
  std::size_t first_filled_ = 0;
  PlainMessages plain_messages_;

  std::span<const std::uint8_t> in_;  // ciphertext: of the scratch memory, or of `rest_`
  std::vector<std::uint8_t> rest_;    // of it, not read yet
  std::vector<std::uint8_t> unsent_;  // ciphertext
  std::size_t unsent_at_ = 0;
  std::uint64_t records_ = 0;      // sent under the present key
  TlsScratch* scratch_ = nullptr;  // during a call
  bool ended_ = false;             // by the other end
  int broken_ = 0;                 // the result of every later read
};

}  // namespace pccl::io

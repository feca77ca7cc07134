#include "pccl/io/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "pccl/io/socket.h"
#include "pccl/os/processor.h"

namespace pccl::io {
namespace {

constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
constexpr std::size_t kBatchBytes = 8 * kRecordBytes;  // encrypted for one system call
constexpr std::size_t kRecordOverhead = 22;            // header, type and tag
constexpr std::size_t kInputBytes = 8 * (kRecordBytes + kRecordOverhead);
constexpr int kFills = 64;                       // of one call: others have their turn
constexpr std::size_t kMostAnswers = 1 << 20;    // ciphertext that reading makes
constexpr std::size_t kMostPlainMessage = 4096;  // a hello has 300 bytes
constexpr std::uint8_t kHandshakeRecord = 22;
constexpr std::uint8_t kFirstRecordType = 20;  // change_cipher_spec
constexpr std::uint8_t kLastRecordType = 23;   // application_data
constexpr const char* kAesFirst = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kAesAlone = "TLS_AES_128_GCM_SHA256";
constexpr const char* kChaChaFirst = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
// Of AES. A key belongs to a hash, which both suites share, and not to a cipher.
constexpr std::uint8_t kSuiteOfKey[2] = {0x13, 0x01};
constexpr int kBadMessage = -EBADMSG;

std::string last_error() {
  const unsigned long error = ERR_peek_last_error();
  const char* text = ERR_reason_error_string(error);
  return text == nullptr ? "no reason given" : text;
}

// OpenSSL 1.1.1 refuses a list with a suite that it was built without. Later versions skip it.
bool set_suites(SSL_CTX* context, bool aes_first) {
  if (SSL_CTX_set_ciphersuites(context, aes_first ? kAesFirst : kChaChaFirst) == 1) return true;
  ERR_clear_error();
  return SSL_CTX_set_ciphersuites(context, kAesAlone) == 1;
}

}  // namespace

// Ciphertext of one call. The one used last is taken first: it is most likely in a cache.
struct TlsScratch {
  std::vector<std::uint8_t> input = std::vector<std::uint8_t>(kInputBytes);
  std::vector<std::uint8_t> output;
  std::vector<std::uint8_t> gathered = std::vector<std::uint8_t>(kRecordBytes);
};

// Scratch memory for a call of an end.
class Tls::Use {
 public:
  explicit Use(Tls& tls) : tls_(tls) {
    TlsContext& context = *tls.context_;
    const std::lock_guard lock(context.mutex_);
    if (!context.scratch_.empty()) {
      scratch_ = std::move(context.scratch_.back());
      context.scratch_.pop_back();
    } else {
      context.scratch_.reserve(context.scratch_.capacity() + 1);  // so that it can be given back
      scratch_ = std::make_unique<TlsScratch>();
    }
    tls_.scratch_ = scratch_.get();
  }
  ~Use() {
    tls_.scratch_ = nullptr;
    const std::lock_guard lock(tls_.context_->mutex_);
    tls_.context_->scratch_.push_back(std::move(scratch_));
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Tls& tls_;
  std::unique_ptr<TlsScratch> scratch_;
};

// Callbacks of OpenSSL, which is C: they must not throw.
struct TlsCallbacks {
  static Tls& of(BIO* bio) { return *static_cast<Tls*>(BIO_get_data(bio)); }
  static Tls& of(const SSL* ssl) { return *static_cast<Tls*>(SSL_get_app_data(ssl)); }

  static int write(BIO* bio, const char* data, int size) {
    auto& out = of(bio).scratch_->output;
    try {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
      out.insert(out.end(), bytes, bytes + size);
    } catch (const std::bad_alloc&) {
      return -1;
    }
    return size;
  }

  static int read(BIO* bio, char* data, int size) {
    BIO_clear_retry_flags(bio);
    auto& in = of(bio).in_;
    if (in.empty()) {
      BIO_set_retry_read(bio);
      return -1;
    }
    const std::size_t taken = std::min(in.size(), static_cast<std::size_t>(size));
    std::memcpy(data, in.data(), taken);
    in = in.subspan(taken);
    return static_cast<int>(taken);
  }

  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  // `hash`: of the suite that the server has chosen already (HelloRetryRequest). With another hash
  // OpenSSL would silently ignore the key, and ask for the server's certificate instead.
  static int offer_key(SSL* ssl, const EVP_MD* hash, const unsigned char** identity,
                       std::size_t* size, SSL_SESSION** session) {
    const Tls& tls = of(ssl);
    *session = nullptr;
    if (hash != nullptr && EVP_MD_type(hash) != NID_sha256) return 0;
    *session = tls.session();
    if (*session == nullptr) return 0;
    *identity = reinterpret_cast<const unsigned char*>(tls.identity_.data());
    *size = tls.identity_.size();
    return 1;
  }

  static int find_key(SSL* ssl, const unsigned char* identity, std::size_t size,
                      SSL_SESSION** session) {
    const Tls& tls = of(ssl);
    *session = nullptr;
    if (std::string_view(reinterpret_cast<const char*>(identity), size) != tls.identity_) return 1;
    *session = tls.session();
    return *session == nullptr ? 0 : 1;
  }
};

bool PlainMessages::admit(std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) {
    if (record_left_ == 0) {
      record_[record_filled_++] = byte;
      if (record_filled_ < record_.size()) continue;
      record_filled_ = 0;
      record_left_ = std::size_t{record_[3]} << 8 | record_[4];
      continue;
    }
    --record_left_;
    if (record_[0] != kHandshakeRecord) continue;
    if (message_left_ > 0) {
      --message_left_;
      continue;
    }
    message_[message_filled_++] = byte;
    if (message_filled_ < message_.size()) continue;
    message_filled_ = 0;
    message_left_ = std::size_t{message_[1]} << 16 | std::size_t{message_[2]} << 8 | message_[3];
    if (message_left_ > kMostPlainMessage) return false;
  }
  return true;
}

// ---- TlsContext

TlsOptions::TlsOptions(const Settings& settings)
    : aes_first(settings.cipher == Cipher::automatic ? os::has_aes()
                                                     : settings.cipher == Cipher::aes),
      key_update_records(settings.key_update_records) {}

Result<std::shared_ptr<TlsContext>> TlsContext::make(const TlsOptions& options) {
  // Without a clean-up at exit: threads of the library may still run then.
  (void)OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  std::shared_ptr<TlsContext> made(new TlsContext(options));
  SSL_CTX* context = made->context_ = SSL_CTX_new(TLS_method());
  made->method_ = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "pccl");
  const auto failed = [] {
    return Error{Code::not_supported, "OpenSSL cannot do TLS 1.3 here: " + last_error()};
  };
  if (context == nullptr || made->method_ == nullptr) return failed();
  BIO_meth_set_write(made->method_, TlsCallbacks::write);
  BIO_meth_set_read(made->method_, TlsCallbacks::read);
  BIO_meth_set_ctrl(made->method_, TlsCallbacks::control);
  if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) != 1 ||
      !set_suites(context, options.aes_first) || SSL_CTX_set1_groups_list(context, "X25519") != 1 ||
      SSL_CTX_set_num_tickets(context, 0) != 1 || SSL_CTX_set_max_early_data(context, 0) != 1 ||
      SSL_CTX_set_recv_max_early_data(context, 0) != 1)
    return failed();
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  // ChaCha20 for an end that prefers it, at either side of the connection.
  SSL_CTX_set_options(context, SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
  SSL_CTX_clear_options(context, SSL_OP_ALLOW_NO_DHE_KEX);
  SSL_CTX_set_psk_use_session_callback(context, TlsCallbacks::offer_key);
  SSL_CTX_set_psk_find_session_callback(context, TlsCallbacks::find_key);
  return made;
}

TlsContext::TlsContext(const TlsOptions& options) : options_(options) {}

TlsContext::~TlsContext() {
  SSL_CTX_free(context_);
  BIO_meth_free(method_);
}

std::unique_ptr<Tls> TlsContext::client(TlsRole role, const Key& key) {
  return make_end(role, key, true);
}
std::unique_ptr<Tls> TlsContext::server(TlsRole role, const Key& key) {
  return make_end(role, key, false);
}

std::unique_ptr<Tls> TlsContext::make_end(TlsRole role, const Key& key, bool client) {
  std::unique_ptr<Tls> made(new Tls(shared_from_this(), role, key, client));
  made->ssl_ = SSL_new(context_);
  BIO* bio = BIO_new(method_);
  if (made->ssl_ == nullptr || bio == nullptr) {
    BIO_free(bio);
    throw std::bad_alloc();
  }
  BIO_set_data(bio, made.get());
  BIO_set_init(bio, 1);
  SSL_set_bio(made->ssl_, bio, bio);
  SSL_set_app_data(made->ssl_, made.get());
  if (client) {
    SSL_set_connect_state(made->ssl_);
    // A server that does not know the key would go on with a certificate; none is accepted.
    SSL_set_verify(made->ssl_, SSL_VERIFY_PEER, nullptr);
  } else {
    SSL_set_accept_state(made->ssl_);
  }
  return made;
}

// ---- Tls

Tls::Tls(std::shared_ptr<TlsContext> context, TlsRole role, const Key& key, bool client)
    : context_(std::move(context)),
      role_(role),
      client_(client),
      key_(std::make_unique<Key>(key)),
      identity_(identity()) {}

Tls::~Tls() { SSL_free(ssl_); }

// It is sent unencrypted, so it tells nothing about the run.
std::string Tls::identity() const {
  return role_ == TlsRole::control ? "pccl control" : "pccl link";
}

SSL_SESSION* Tls::session() const {
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl_, kSuiteOfKey);
  SSL_SESSION* made = SSL_SESSION_new();
  if (made == nullptr || key_ == nullptr || cipher == nullptr ||
      SSL_SESSION_set1_master_key(made, key_->bytes.data(), key_->bytes.size()) != 1 ||
      SSL_SESSION_set_cipher(made, cipher) != 1 ||
      SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) != 1) {
    SSL_SESSION_free(made);
    return nullptr;
  }
  return made;
}

Status Tls::shake(int descriptor) {
  const Use use(*this);
  for (int i = 0; i < kFills; ++i) {
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl_);
    const int error = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_, done);
    Status status;
    if (done == 1) {
      status = check_peer();
    } else if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) {
      status = failure(error);
    }
    const ssize_t put = flush(descriptor);  // of an alert, too, which tells the reason
    if (!status) return status;
    if (put < 0 && put != -EAGAIN) return Status(Code::unreachable, "closed the connection");
    if (done == 1) {
      keep_rest();
      established_ = true;
      key_.reset();
      return {};
    }
    const ssize_t got = fill(descriptor, kRecordBytes);
    if (got == -EAGAIN) return {};
    if (got <= 0)
      return Status(Code::unreachable, "closed the connection during the TLS handshake");
    for (const std::uint8_t byte : in_.first(std::min(in_.size(), first_.size() - first_filled_)))
      first_[first_filled_++] = byte;
    if (first_[0] < kFirstRecordType || first_[0] > kLastRecordType) {
      constexpr std::array<std::uint8_t, 4> kPlain{'P', 'C', 'C', 'L'};
      if (first_filled_ < kPlain.size() &&
          std::equal(first_.begin(), first_.begin() + first_filled_, kPlain.begin())) {
        in_ = {};  // wait for the rest of the first four bytes
        continue;
      }
      met_plain_peer_ = first_ == kPlain;
      return failure(SSL_ERROR_NONE);
    }
    if (!plain_messages_.admit(in_)) {
      return Status(
          Code::authentication_failed,
          "announces a longer message in the TLS handshake than any version of pccl sends");
    }
  }
  return Status(Code::authentication_failed, "does not finish the TLS handshake");
}

// Accepts nothing but the key, whatever else the handshake has accepted.
Status Tls::check_peer() {
  if (SSL_session_reused(ssl_) == 1 && SSL_version(ssl_) == TLS1_3_VERSION) return {};
  return Status(Code::authentication_failed, "does not know the secret");
}

Status Tls::failure(int error) {
  if (error == SSL_ERROR_NONE) {
    return Status(Code::authentication_failed,
                  client_ ? "does not speak TLS; was it started without a secret?"
                          : "does not speak TLS; it may have no secret");
  }
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  if (reason >= SSL_AD_REASON_OFFSET && reason < SSL_AD_REASON_OFFSET + 256) {
    return Status(Code::authentication_failed,
                  "refuses our secret: it has another one, or is another version of pccl");
  }
  return Status(Code::authentication_failed,
                "does not know the secret, or has another version of pccl (" + last_error() + ")");
}

// Reads ciphertext, when all that came before is used up; not much more than `wanted`, since the
// rest would have to be copied.
ssize_t Tls::fill(int descriptor, std::size_t wanted) {
  if (broken_ != 0) return broken_;
  if (ended_) return 0;
  rest_.clear();
  const std::size_t most = wanted + (wanted / kRecordBytes + 1) * kRecordOverhead;
  const iovec into{scratch_->input.data(), std::min(scratch_->input.size(), most)};
  const ssize_t got = receive(descriptor, {&into, 1});
  if (got > 0) in_ = std::span(scratch_->input).first(static_cast<std::size_t>(got));
  if (got == 0) ended_ = true;
  if (got < 0 && got != -EAGAIN) broken_ = static_cast<int>(got);
  return got;
}

// Copies unused ciphertext: the scratch memory is used by other connections, too.
void Tls::keep_rest() {
  if (in_.empty()) {
    rest_.clear();
  } else if (!rest_.empty()) {
    rest_.erase(rest_.begin(), rest_.end() - static_cast<std::ptrdiff_t>(in_.size()));
  } else {
    rest_.assign(in_.begin(), in_.end());
  }
  in_ = {};
}

// 0, or -errno; bytes that the descriptor does not take stay `unsent`.
ssize_t Tls::flush(int descriptor) {
  auto& output = scratch_->output;
  if (unsent()) {
    unsent_.insert(unsent_.end(), output.begin(), output.end());
    output.clear();
  }
  const auto give = [&](std::vector<std::uint8_t>& bytes, std::size_t& at) -> ssize_t {
    while (at < bytes.size()) {
      const iovec from{bytes.data() + at, bytes.size() - at};
      const ssize_t put = transmit(descriptor, {&from, 1});
      if (put < 0) return put;
      at += static_cast<std::size_t>(put);
    }
    bytes.clear();
    at = 0;
    return 0;
  };
  if (unsent()) return give(unsent_, unsent_at_);
  std::size_t at = 0;
  const ssize_t result = give(output, at);
  if (result == 0) return 0;
  unsent_.assign(output.begin() + static_cast<std::ptrdiff_t>(at), output.end());
  unsent_at_ = 0;
  output.clear();
  return result;
}

ssize_t Tls::read(int descriptor, std::span<const iovec> into) {
  const Use use(*this);
  in_ = rest_;
  std::size_t room = 0;
  for (const iovec& part : into) room += part.iov_len;
  std::size_t total = 0;
  ssize_t why = -EAGAIN;
  int fills = 0;
  bool dry = false;
  for (auto part = into.begin(); part != into.end() && !dry; ++part) {
    for (std::size_t filled = 0; filled < part->iov_len && !dry;) {
      ERR_clear_error();
      std::size_t got = 0;
      const int done = SSL_read_ex(ssl_, static_cast<std::uint8_t*>(part->iov_base) + filled,
                                   part->iov_len - filled, &got);
      if (done == 1) {
        filled += got;
        total += got;
        continue;
      }
      const int error = SSL_get_error(ssl_, done);
      if (error == SSL_ERROR_WANT_READ) {
        why = ++fills <= kFills ? fill(descriptor, std::max(room - total, kRecordBytes)) : -EAGAIN;
      } else if (error == SSL_ERROR_ZERO_RETURN) {
        ended_ = true;
        why = 0;
      } else {
        why = broken_ = kBadMessage;
      }
      dry = why <= 0;
    }
  }
  keep_rest();
  if (!scratch_->output.empty()) (void)flush(descriptor);  // answers, or an alert
  if (unsent_.size() - unsent_at_ > kMostAnswers + 2 * kBatchBytes) why = broken_ = kBadMessage;
  return total > 0 ? static_cast<ssize_t>(total) : why;
}

bool Tls::encrypt(const void* data, std::size_t size) {
  ERR_clear_error();
  std::size_t put = 0;
  if (SSL_write_ex(ssl_, data, size, &put) != 1 || put != size) return false;
  if (++records_ < context_->options_.key_update_records) return true;
  records_ = 0;
  return SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) == 1;  // before the next record
}

// Writes full records: gathers parts that are smaller than a record.
ssize_t Tls::write(int descriptor, std::span<const iovec> from) {
  if (broken_ != 0) return broken_;
  const Use use(*this);
  if (unsent()) {
    if (const ssize_t result = flush(descriptor); result < 0) return result;
  }
  std::size_t taken = 0;
  auto part = from.begin();
  std::size_t at = 0;
  const auto fail = [&] {
    scratch_->output.clear();
    return broken_ = kBadMessage;
  };
  const auto left = [&] { return part->iov_len - at; };
  const auto here = [&] { return static_cast<const std::uint8_t*>(part->iov_base) + at; };
  const auto advance = [&](std::size_t size) {
    at += size;
    if (left() > 0) return;
    ++part;
    at = 0;
  };
  while (part != from.end() && taken < kBatchBytes) {
    if (left() >= kRecordBytes) {
      if (!encrypt(here(), kRecordBytes)) return fail();
      taken += kRecordBytes;
      advance(kRecordBytes);
      continue;
    }
    std::size_t size = 0;
    while (part != from.end() && size < kRecordBytes) {
      const std::size_t more = std::min(left(), kRecordBytes - size);
      if (more > 0) std::memcpy(scratch_->gathered.data() + size, here(), more);
      size += more;
      advance(more);
    }
    if (size > 0 && !encrypt(scratch_->gathered.data(), size)) return fail();
    taken += size;
  }
  const ssize_t result = flush(descriptor);
  return result < 0 && result != -EAGAIN ? result : static_cast<ssize_t>(taken);
}

bool Tls::buffered() const {
  return established_ && (!rest_.empty() || ended_ || broken_ != 0 || SSL_pending(ssl_) > 0);
}

}  // namespace pccl::io

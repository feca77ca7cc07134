// Resolves names. A look-up blocks a thread for as long as name servers do not answer, and nothing
// can end it. So nothing waits for these threads, not even the end of the loop.
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/wire/records.h"

namespace pccl::io {

// The look-ups of one loop. *one thread at a time: whoever drives the loop*
class LookUps : public asio::execution_context::service {
 public:
  struct Answer {
    std::string failure;  // empty: there are endpoints
    std::vector<asio::ip::tcp::endpoint> endpoints;
  };
  using Done = std::function<void(const Answer&)>;

  static asio::execution_context::id id;  // Asio finds the service by it
  explicit LookUps(asio::io_context& context);
  [[nodiscard]] static LookUps& of(asio::io_context& context) {
    return asio::use_service<LookUps>(context);
  }

  // `done` is called once, from the loop, unless cancelled or the loop ends. A name is looked up
  // once at a time. An answer that comes when nobody waits any more is for the next one who asks
  // soon. Returns a number that is never 0.
  std::uint64_t start(const wire::Address& address, Done done);
  void cancel(std::uint64_t number);

 private:
  struct Shared;
  struct Name {
    std::map<std::uint64_t, Done> waiting;
    bool runs = false;             // or is about to
    std::unique_ptr<Answer> kept;  // null: none
    Instant kept_at{};
  };
  using Names = std::map<std::string, Name>;  // by the address's text

  static void work(const std::shared_ptr<Shared>& shared);
  static void tell(Shared& shared, const std::string& name, Answer answer);
  void ask(const std::string& text, const wire::Address& address);
  void on_answer(const std::string& text, const Answer& answer);
  void shutdown() override;

  asio::io_context& context_;
  std::uint64_t next_ = 1;
  Names names_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace pccl::io

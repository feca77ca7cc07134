// A peer's connection to its master: dials it, and moves bytes between it and the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pccl/io/connector.h"
#include "pccl/io/tls.h"
#include "pccl/io/write_queue.h"
#include "pccl/node/options.h"

namespace pccl::node {

// *one thread at a time: whoever drives the loop*
class MasterConnection {
 public:
  // `tls`: null without a secret. `act` carries out what the engine asks for after an event.
  MasterConnection(asio::io_context& context, peer::Engine& engine, const RuntimeOptions& options,
                   std::shared_ptr<io::TlsContext> tls, std::function<void()> act);

  // `index`: of the master's address.
  void dial(std::uint32_t index);
  void send(const std::vector<wire::Bytes>& messages);
  // Closes the connection when what is queued is written.
  void finish();
  void stop();
  [[nodiscard]] bool flushed() const {
    return connection_.socket == nullptr ||
           (connection_.out.size() == 0 && !connection_.socket->unsent());
  }
  // Why the latest attempt to reach the master failed.
  [[nodiscard]] const std::string& dial_failure() const { return dial_failure_; }

 private:
  struct Connection {
    std::unique_ptr<io::Socket> socket;
    std::uint64_t number = 0;  // events of an earlier connection have another one
    io::WriteQueue out;
    bool closing = false;
  };

  void connected(std::unique_ptr<io::Socket> socket, const Error& failure);
  void await_readable();
  void read(std::uint64_t number);
  void write();
  [[nodiscard]] bool is_open(std::uint64_t number) const;

  asio::io_context& context_;
  peer::Engine& engine_;
  const RuntimeOptions& options_;
  const std::shared_ptr<io::TlsContext> tls_;
  const std::function<void()> act_;
  std::shared_ptr<io::Connector> attempt_;
  wire::Address at_;  // of the latest attempt
  Connection connection_;
  std::uint64_t next_number_ = 1;
  std::string dial_failure_;
  std::vector<std::uint8_t> scratch_;
};

}  // namespace pccl::node

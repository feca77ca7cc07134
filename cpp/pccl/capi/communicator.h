// A communicator as C holds it: the engine's, once it is connected, and the
// tags of reductions that were not awaited yet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "pccl.h"
#include "pccl/base/fork.h"
#include "pccl/capi/call.h"
#include "pccl/capi/exit.h"
#include "pccl/node/communicator.h"

namespace pccl::capi {

// The result of one connect: a peer, and its reductions. *any thread*
class Connection {
 public:
  explicit Connection(const node::CommunicatorOptions& options) : peer(options) {}

  // Takes all of the tags, or none: invalid_argument.
  Status take(std::span<const std::uint64_t> tags);
  void release(std::span<const std::uint64_t> tags);
  // REQUIRES: the tag is taken. It stays so until the call is awaited.
  void launched(std::uint64_t tag, const peer::CallPtr& call);
  [[nodiscard]] Result<peer::CallPtr> find(std::uint64_t tag);
  // Releases the tag, unless another thread did so first.
  void awaited(std::uint64_t tag, const peer::CallPtr& call);

  node::Communicator peer;

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, peer::CallPtr> tags_;  // null: of a call that blocks, or is being made
};
using ConnectionPtr = std::shared_ptr<Connection>;

// Tags for as long as a call lasts.
class Tags {
 public:
  Tags(Connection& connection, std::span<const std::uint64_t> tags)
      : connection_(connection), tags_(tags), taken_(connection.take(tags)), held_(taken_.ok()) {}
  ~Tags() {
    if (held_) connection_.release(tags_);
  }
  Tags(const Tags&) = delete;
  Tags& operator=(const Tags&) = delete;
  [[nodiscard]] const Status& taken() const { return taken_; }
  // Leaves them taken.
  void keep() { held_ = false; }

 private:
  Connection& connection_;
  std::span<const std::uint64_t> tags_;
  const Status taken_;
  bool held_;
};

// *any thread*
class Comm final : public ClosedAtExit {
 public:
  explicit Comm(node::CommunicatorOptions options) : options_(std::move(options)) { opened(); }
  ~Comm() { gone(); }

  Status connect();
  // The latest connection, even if this peer is out of the run since.
  [[nodiscard]] Result<ConnectionPtr> connection();
  void close() override;
  // This is a forked child's copy.
  [[nodiscard]] bool inert() const { return fork_generation() != generation_; }
  [[nodiscard]] node::Limit limit() const { return {options_.settings.timeout, {}}; }

 private:
  const node::CommunicatorOptions options_;
  const std::uint64_t generation_ = fork_generation();
  std::mutex mutex_;  // guards what follows; never held in a blocking call
  ConnectionPtr connection_;
  ConnectionPtr joining_;
  bool closed_ = false;
};

[[nodiscard]] Status check_initialized();

}  // namespace pccl::capi

struct pcclComm_t {
  // Calls keep it until they return, even if another thread destroys the handle
  // meanwhile.
  std::shared_ptr<pccl::capi::Comm> comm;
};

namespace pccl::capi {

// Runs `body`, which takes a Comm and returns a Status.
template <class Body>
pcclResult_t with_comm(const char* function, CallKind kind, const pcclComm_t* comm,
                       const Body& body) noexcept {
  return call(function, kind, [&]() -> Status {
    if (Status status = check_initialized(); !status) return status;
    if (comm == nullptr) return refuse("comm is NULL");
    const std::shared_ptr<Comm> kept = comm->comm;
    return body(*kept);
  });
}

// Runs `body`, which takes a Connection and a Limit and returns a Status.
template <class Body>
pcclResult_t connected(const char* function, CallKind kind, const pcclComm_t* comm,
                       const Body& body) noexcept {
  return with_comm(function, kind, comm, [&](Comm& kept) -> Status {
    const Result<ConnectionPtr> connection = kept.connection();
    if (!connection) return connection.error();
    return body(**connection, kept.limit());
  });
}

}  // namespace pccl::capi

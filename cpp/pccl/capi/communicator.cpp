// pccl.h: communicators, joining and leaving, and the membership.
#include "pccl/capi/communicator.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pccl/base/text.h"
#include "pccl/capi/address.h"
#include "pccl/io/address.h"
#include "pccl/io/openssl.h"
#include "pccl/master/surroundings.h"

namespace pccl::capi {
namespace {

constexpr const char* kOut = "this peer is out of the run; it may connect again";

std::atomic<bool> initialized{false};

Error usage(std::string sentence) { return {Code::invalid_usage, std::move(sentence)}; }
Error forked() {
  return usage("this process was forked; its copy of the communicator cannot be used");
}
Error destroyed() { return usage("this communicator was destroyed"); }

// Empty counts as unset.
std::string_view text(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::string_view() : value;
}

// PCCL_PORT, which Python takes as an argument. 0: any port.
Result<std::uint16_t> own_port() {
  const std::string_view given = text("PCCL_PORT");
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), port);
  if (!given.empty() && (error != std::errc() || end != given.data() + given.size())) {
    return {Code::invalid_argument, "PCCL_PORT must be a port, not \"" + std::string(given) + "\""};
  }
  return port;
}

// PCCL_ADVERTISE: "host[:port],...".
Result<std::vector<wire::Address>> advertised() {
  std::vector<wire::Address> addresses;
  std::string_view rest = text("PCCL_ADVERTISE");
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = trim(rest.substr(0, comma));
    rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
    if (part.empty()) continue;
    auto address = wire::parse_address(part, 0);
    if (!address) return address.error();
    if (address->host.empty()) {
      return {Code::invalid_argument,
              "PCCL_ADVERTISE: \"" + std::string(part) + "\" names no host"};
    }
    addresses.push_back(std::move(*address));
  }
  return addresses;
}

Result<node::CommunicatorOptions> options_from(const pcclCommCreateParams_t& params) {
  node::CommunicatorOptions options;
  const Result<io::Secret> secret = io::Secret::from_environment();
  if (!secret) return secret.error();
  options.secret = *secret;
  const Result<Settings> settings = Settings::from_environment();
  if (!settings) return settings.error();
  options.settings = *settings;
  const Result<wire::Address> master = from_c(params.master_address);
  if (!master) return master.error();
  if (master->port == 0) return refuse("the master's address has no port").error();
  options.masters = {*master};
  // The struct has one address. PCCL_MASTER may list more, if that one is in the list.
  const char* const listed = std::getenv("PCCL_MASTER");
  if (listed != nullptr && std::strchr(listed, ',') != nullptr) {
    const auto masters = wire::parse_masters(listed, wire::kDefaultPort);
    if (!masters) return masters.error();
    // Names are resolved only if no number is the same.
    const auto same = [&](const wire::Address& one) { return io::stands_for(one, *master); };
    if (std::ranges::find(*masters, *master) != masters->end() ||
        std::ranges::any_of(*masters, same)) {
      options.masters = *masters;
    }
  }
  if (params.peer_group >= master::kOwnGroups) {
    return refuse("peer_group is more than " + std::to_string(master::kOwnGroups - 1)).error();
  }
  options.group = params.peer_group;
  if (params.p2p_connection_pool_size > 255)
    return refuse("p2p_connection_pool_size is more than 255").error();
  if (params.p2p_connection_pool_size != 0)
    options.settings.stripes = params.p2p_connection_pool_size;
  const Result<std::uint16_t> port = own_port();
  if (!port) return port.error();
  options.port = *port;
  auto advertise = advertised();
  if (!advertise) return advertise.error();
  options.advertise = std::move(*advertise);
  return options;
}

Result<std::uint64_t> read(const node::View& view, pcclAttribute_t attribute) {
  switch (attribute) {
    case PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE:
      return view.census.members;
    case PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE:
      return view.record == nullptr ? 0 : view.record->members.size();
    case PCCL_ATTRIBUTE_NUM_DISTINCT_PEER_GROUPS:
      return view.census.groups;
    case PCCL_ATTRIBUTE_LARGEST_PEER_GROUP_WORLD_SIZE:
      return view.census.largest_group;
  }
  return refuse("no attribute " + std::to_string(static_cast<int>(attribute))).error();
}

}  // namespace

Status Connection::take(std::span<const std::uint64_t> tags) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t tag : tags) {
    if (tags_.contains(tag)) {
      return refuse("tag " + std::to_string(tag) +
                    " is taken by another reduction, which has not ended or "
                    "was not awaited");
    }
  }
  for (const std::uint64_t tag : tags) tags_[tag] = nullptr;
  return {};
}

void Connection::release(std::span<const std::uint64_t> tags) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t tag : tags) tags_.erase(tag);
}

void Connection::launched(std::uint64_t tag, const peer::CallPtr& call) {
  const std::lock_guard lock(mutex_);
  tags_[tag] = call;
}

Result<peer::CallPtr> Connection::find(std::uint64_t tag) {
  const std::lock_guard lock(mutex_);
  const auto found = tags_.find(tag);
  if (found != tags_.end() && found->second != nullptr) return found->second;
  return usage("no asynchronous reduction with tag " + std::to_string(tag) + " to await");
}

void Connection::awaited(std::uint64_t tag, const peer::CallPtr& call) {
  const std::lock_guard lock(mutex_);
  const auto found = tags_.find(tag);
  if (found != tags_.end() && found->second == call) tags_.erase(found);
}

Status Comm::connect() {
  if (inert()) return forked();
  ConnectionPtr made;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return destroyed();
    if (joining_ != nullptr || (connection_ != nullptr && connection_->peer.is_open()))
      return usage("connected already");
    // After a failure to join, or its loss, this process joins as a new peer.
    made = joining_ = std::make_shared<Connection>(options_);
  }
  Status status;
  try {
    status = made->peer.join({}, limit());
  } catch (...) {
    const std::lock_guard lock(mutex_);
    joining_.reset();
    throw;
  }
  ConnectionPtr before;  // closed without the lock
  const std::lock_guard lock(mutex_);
  joining_.reset();
  if (status && closed_) status = destroyed();
  if (!status) return status;
  before = std::exchange(connection_, std::move(made));
  return {};
}

Result<ConnectionPtr> Comm::connection() {
  if (inert()) return forked();
  const std::lock_guard lock(mutex_);
  if (connection_ != nullptr) return connection_;
  return usage("not connected; call pcclConnect first");
}

void Comm::close() {
  if (inert()) return;
  ConnectionPtr open[2];
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    open[0] = connection_;
    open[1] = joining_;
  }
  for (const ConnectionPtr& connection : open)
    if (connection != nullptr) connection->peer.close();
}

Status check_initialized() {
  if (initialized.load(std::memory_order_relaxed)) return {};
  return Status(Code::not_initialized, "call pcclInit first");
}

}  // namespace pccl::capi

// ---- pccl.h

using namespace pccl;        // NOLINT: this file implements a C header
using namespace pccl::capi;  // NOLINT

pcclResult_t pcclInit() {
  io::prepare_openssl();
  initialized.store(true, std::memory_order_relaxed);
  return pcclSuccess;
}

pcclResult_t pcclCreateCommunicator(const pcclCommCreateParams_t* params, pcclComm_t** comm_out) {
  return call(__func__, CallKind::connect, [&]() -> Status {
    if (Status status = check_initialized(); !status) return status;
    if (params == nullptr) return refuse("params is NULL");
    if (comm_out == nullptr) return refuse("comm_out is NULL");
    auto options = options_from(*params);
    if (!options) return options.error();
    *comm_out = new pcclComm_t{std::make_shared<Comm>(std::move(*options))};
    return {};
  });
}

pcclResult_t pcclDestroyCommunicator(pcclComm_t* comm) {
  return with_comm(__func__, CallKind::connect, comm, [&](Comm& kept) -> Status {
    if (kept.inert()) return {};  // its threads are in the parent process
    kept.close();
    delete comm;
    return {};
  });
}

pcclResult_t pcclConnect(pcclComm_t* comm) {
  return with_comm(__func__, CallKind::connect, comm, [](Comm& kept) { return kept.connect(); });
}

pcclResult_t pcclGetAttribute(const pcclComm_t* comm, pcclAttribute_t attribute, int* value_out) {
  return connected(__func__, CallKind::question, comm,
                   [&](Connection& connection, const node::Limit&) -> Status {
                     if (value_out == nullptr) return refuse("value_out is NULL");
                     if (!connection.peer.is_open()) return usage(kOut);
                     const Result<node::View> view = connection.peer.view();
                     if (!view) return view.error();
                     const Result<std::uint64_t> value = read(*view, attribute);
                     if (!value) return value.error();
                     *value_out = static_cast<int>(*value);
                     return {};
                   });
}

pcclResult_t pcclUpdateTopology(pcclComm_t* comm) {
  return connected(__func__, CallKind::topology, comm,
                   [](Connection& connection, const node::Limit& limit) {
                     return connection.peer.update_topology(limit);
                   });
}

pcclResult_t pcclArePeersPending(const pcclComm_t* comm, bool* pending_out) {
  return connected(__func__, CallKind::question, comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     if (pending_out == nullptr) return refuse("pending_out is NULL");
                     const Result<bool> pending = connection.peer.peers_pending(limit);
                     if (!pending) return pending.error();
                     *pending_out = *pending;
                     return {};
                   });
}

pcclResult_t pcclOptimizeTopology(const pcclComm_t* comm) {
  return connected(__func__, CallKind::optimize, comm,
                   [](Connection& connection, const node::Limit& limit) -> Status {
                     if (!connection.peer.is_open()) return Status(Code::evicted, kOut);
                     return connection.peer.optimize(limit);
                   });
}

// pccl.h: masters, and the library itself.
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/capi/address.h"
#include "pccl/capi/call.h"
#include "pccl/capi/exit.h"
#include "pccl/io/address.h"
#include "pccl/io/openssl.h"
#include "pccl/io/thread.h"
#include "pccl/os/bell.h"
#include "pccl/server/server.h"

namespace pccl::capi {
namespace {

constexpr Duration kSlice = std::chrono::hours(1);  // of a wait without end

// *any thread*, but for the destructor
class Master final : public ClosedAtExit {
 public:
  Master(const wire::Address& listen, const Settings& settings, const io::Secret& secret)
      : server_(listen, settings, secret) {
    opened();
  }
  ~Master() {
    gone();
    close();
  }

  Status run();
  Status interrupt();
  // interrupt() for signal handlers. False: it would fail.
  bool ring() noexcept;
  Status wait();
  [[nodiscard]] Result<wire::Address> address() const;
  void close() override;
  // This is a forked child's copy: neither used nor destroyed.
  [[nodiscard]] bool inert() const { return fork_generation() != generation_; }

 private:
  [[nodiscard]] Status check_ran() const;

  const std::uint64_t generation_ = fork_generation();
  server::Server server_;
  std::mutex mutex_;  // guards run, and the end of the thread
  std::atomic<bool> ran_{false};
  // A signal handler may only ring it; the thread does the work.
  os::Bell stop_;
  std::thread stopper_;
};

Status Master::check_ran() const {
  if (inert()) return Status(Code::invalid_usage, "this process was forked; its copy is no master");
  if (!ran_.load(std::memory_order_acquire))
    return Status(Code::invalid_usage, "this master was never run");
  return {};
}

Status Master::run() {
  if (inert()) return check_ran();
  const std::lock_guard lock(mutex_);
  if (ran_) return Status(Code::invalid_usage, "a master runs once");
  if (Status status = server_.run(); !status) return status;
  try {
    stopper_ = io::start_thread([this] {
      stop_.wait();
      server_.interrupt();
    });
  } catch (...) {
    server_.interrupt();
    throw;
  }
  ran_.store(true, std::memory_order_release);
  return {};
}

bool Master::ring() noexcept {
  if (inert() || !ran_.load(std::memory_order_acquire)) return false;
  stop_.ring();
  return true;
}

Status Master::interrupt() { return ring() ? Status() : check_ran(); }

Status Master::wait() {
  if (Status status = check_ran(); !status) return status;
  while (!server_.wait(clock_now() + kSlice)) {
  }
  return {};
}

Result<wire::Address> Master::address() const {
  if (const Status status = check_ran(); !status) return status.error();
  return wire::parse_address(server_.address(), 0);
}

void Master::close() {
  if (!check_ran()) return;
  stop_.ring();
  const std::lock_guard lock(mutex_);
  if (stopper_.joinable()) stopper_.join();
}

}  // namespace
}  // namespace pccl::capi

struct pcclMasterInstanceState_t {
  pccl::capi::Master master;
};

namespace pccl::capi {
namespace {

// Runs `body`, which takes a Master and returns a Status.
template <class Handle, class Body>
pcclResult_t with_master(const char* function, Handle* handle, const Body& body) noexcept {
  return call(function, CallKind::collective, [&]() -> Status {
    return handle == nullptr ? refuse("master is NULL") : body(handle->master);
  });
}

Status write_address(const Result<wire::Address>& address, ccoip_socket_address_t& out) {
  if (!address) return address.error();
  const Result<ccoip_socket_address_t> made = to_c(*address);
  if (!made) return made.error();
  out = *made;
  return {};
}

}  // namespace
}  // namespace pccl::capi

// ---- pccl.h

using namespace pccl;        // NOLINT: this file implements a C header
using namespace pccl::capi;  // NOLINT

pcclResult_t pcclCreateMaster(ccoip_socket_address_t listen_address,
                              pcclMasterInstance_t** master_out) {
  return call(__func__, CallKind::collective, [&]() -> Status {
    if (master_out == nullptr) return refuse("master_out is NULL");
    io::prepare_openssl();
    const Result<io::Secret> secret = io::Secret::from_environment();
    if (!secret) return secret.error();
    const Result<wire::Address> listen = from_c(listen_address);
    if (!listen) return listen.error();
    const Result<Settings> settings = Settings::from_environment();
    if (!settings) return settings.error();
    *master_out = new pcclMasterInstanceState_t{{*listen, *settings, *secret}};
    return {};
  });
}

pcclResult_t pcclRunMaster(pcclMasterInstance_t* master) {
  return with_master(__func__, master, [](Master& it) { return it.run(); });
}

pcclResult_t pcclInterruptMaster(pcclMasterInstance_t* master) {
  // Not in the frame of a call: its thread-local variables are allocated at their first use in a
  // thread, and a signal handler may have interrupted malloc.
  if (master != nullptr && master->master.ring()) return pcclSuccess;
  return with_master(__func__, master, [](Master& it) { return it.interrupt(); });
}

pcclResult_t pcclMasterAwaitTermination(pcclMasterInstance_t* master) {
  return with_master(__func__, master, [](Master& it) { return it.wait(); });
}

pcclResult_t pcclDestroyMaster(pcclMasterInstance_t* master) {
  return with_master(__func__, master, [&](Master& it) -> Status {
    if (!it.inert()) delete master;
    return {};
  });
}

pcclResult_t pcclGetMasterAddress(const pcclMasterInstance_t* master,
                                  ccoip_socket_address_t* address_out) {
  return with_master(__func__, master, [&](const Master& it) -> Status {
    if (address_out == nullptr) return refuse("address_out is NULL");
    return write_address(it.address(), *address_out);
  });
}

pcclResult_t pcclResolveAddress(const char* text, ccoip_socket_address_t* address_out) {
  return call(__func__, CallKind::collective, [&]() -> Status {
    if (text == nullptr) return refuse("text is NULL");
    if (address_out == nullptr) return refuse("address_out is NULL");
    const Result<wire::Address> parsed = wire::parse_address(text, wire::kDefaultPort);
    if (!parsed) return parsed.error();
    if (parsed->host.empty()) return refuse("\"" + std::string(text) + "\" names no host");
    return write_address(parsed, *address_out);
  });
}

pcclResult_t pcclGetBuildInfo(pcclBuildInfo_t* build_info_out) {
  return call(__func__, CallKind::question, [&]() -> Status {
    if (build_info_out == nullptr) return refuse("build_info_out is NULL");
    build_info_out->has_cuda_support = false;
    return {};
  });
}

const char* pcclGetLastError() { return last_error(); }

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/bindings/common.h"
#include "pccl/bindings/communicator.h"
#include "pccl/bindings/status.h"
#include "pccl/io/address.h"
#include "pccl/master/surroundings.h"
#include "pccl/server/server.h"

namespace pccl::bindings {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(100);  // between two looks for Ctrl-C

// *any thread that has the GIL*
class Master {
 public:
  Master(const std::string& listen, const io::Secret* secret, std::uint32_t min_peers,
         std::uint32_t masters, std::uint32_t index)
      : generation_(fork_generation()) {
    const auto address = value_of(wire::parse_address(listen, wire::kDefaultPort),
                                  CallKind::collective, "MasterNode");
    server_ = std::make_unique<server::Server>(address, read_settings("MasterNode"),
                                               secret == nullptr ? io::Secret() : *secret,
                                               min_peers, master::MasterPlace{masters, index});
  }
  ~Master() {
    if (inert()) {
      (void)server_.release();  // not destroyed, since its thread is not in this process
      return;
    }
    const GilRelease release;
    server_.reset();
  }
  Master(const Master&) = delete;
  Master& operator=(const Master&) = delete;

  void run() {
    check("MasterNode.run");
    const Status status = ran_ ? Status(Code::invalid_usage, "a master runs once") : server_->run();
    if (!status) raise(status.error(), CallKind::collective, "MasterNode.run");
    ran_ = true;
  }
  std::string address() {
    check("MasterNode.address");
    return server_->address();
  }
  nb::dict status() {
    check("MasterNode.status");
    Result<wire::RunStatus> status = [&] {
      const GilRelease release;
      return server_->status();
    }();
    return to_dict(value_of(std::move(status), CallKind::question, "MasterNode.status"));
  }
  void interrupt() {
    check("MasterNode.interrupt");
    const GilRelease release;
    server_->interrupt();
  }
  bool wait(Seconds timeout) {
    check("MasterNode.wait");
    return poll(timeout, [&](Instant until) { return server_->wait(until); });
  }
  bool departed(const CommunicatorHandle& peer, Seconds timeout) {
    check("MasterNode.departed");
    const std::future<void> departed = server_->departed(peer.engine->id());
    return poll(timeout, [&](Instant until) {
      return departed.wait_until(until) == std::future_status::ready || server_->wait(Instant{});
    });
  }

 private:
  // Calls `ended` until it returns true, each time for a short while. False: the time is over.
  template <class Ended>
  bool poll(Seconds timeout, const Ended& ended) {
    Signals signals;
    const auto limit = duration(timeout);
    const Instant start = clock_now();
    const auto left = [&] { return limit ? *limit - (clock_now() - start) : kSlice; };
    bool over = false;
    {
      const GilRelease release;
      do {
        over = ended(clock_now() + std::min(kSlice, left()));
      } while (!over && !signals.check() && left() > Duration{});
    }
    signals.rethrow();
    return over;
  }
  [[nodiscard]] bool inert() const { return fork_generation() != generation_; }
  void check(const char* function) const {
    if (!inert()) return;
    raise({Code::invalid_usage, "this process was forked; its copy is no master", {}, {}},
          CallKind::collective, function);
  }

  std::uint64_t generation_;
  bool ran_ = false;
  std::unique_ptr<server::Server> server_;
};

}  // namespace

void bind_master(nb::module_& m) {
  m.attr("OWN_GROUPS") = master::kOwnGroups;
  m.attr("FIRST_PAIR") = master::kFirstPair;
  m.attr("FIRST_DOOR") = master::kFirstDoor;
  m.def(
      "parse_masters",
      [](const std::string& text, const std::string& function) {
        std::vector<std::pair<std::string, std::uint16_t>> masters;
        for (const wire::Address& address : value_of(wire::parse_masters(text, wire::kDefaultPort),
                                                     CallKind::collective, function.c_str()))
          masters.emplace_back(address.host, address.port);
        return masters;
      },
      "text"_a, "function"_a);
  nb::class_<Master>(m, "Master")
      .def(nb::init<const std::string&, const io::Secret*, std::uint32_t, std::uint32_t,
                    std::uint32_t>(),
           "listen"_a, nb::arg("secret").none() = nb::none(), "min_peers"_a = 1, "masters"_a = 1,
           "index"_a = 0)
      .def("run", &Master::run)
      .def("address", &Master::address)
      .def("status", &Master::status)
      .def("interrupt", &Master::interrupt)
      .def("wait", &Master::wait, nb::arg("timeout").none())
      .def("departed", &Master::departed, "peer"_a, nb::arg("timeout").none());
}

}  // namespace pccl::bindings

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "pccl/base/fork.h"
#include "pccl/bindings/common.h"
#include "pccl/io/address.h"
#include "pccl/server/server.h"

namespace pccl::bindings {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(100);  // between two looks for Ctrl-C

class Node {
 public:
  Node(const std::string& listen, const io::Secret* secret, std::uint32_t min_peers)
      : generation_(fork_generation()) {
    const auto address = wire::parse_address(listen, wire::kDefaultPort);
    if (!address) raise(address.error(), CallKind::collective, "MasterNode");
    server_ =
        std::make_unique<server::Server>(*address, read_settings("MasterNode"),
                                         secret == nullptr ? io::Secret() : *secret, min_peers);
  }
  ~Node() {
    if (inert()) {
      (void)server_.release();  // it cannot be destroyed without its thread
      return;
    }
    const GilRelease release;
    server_.reset();
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  void run() {
    check("MasterNode.run");
    if (ran_)
      raise({Code::invalid_usage, "a master runs once", {}, {}}, CallKind::collective,
            "MasterNode.run");
    const Status status = server_->run();
    if (!status) raise(status.error(), CallKind::collective, "MasterNode.run");
    ran_ = true;
  }
  std::string address() {
    check("MasterNode.address");
    return server_->address();
  }
  void interrupt() {
    check("MasterNode.interrupt");
    const GilRelease release;
    server_->interrupt();
  }
  bool wait(Seconds timeout) {
    check("MasterNode.wait");
    Signals signals;
    const auto limit = duration(timeout);
    const Instant start = std::chrono::steady_clock::now();
    bool ended = false;
    {
      const GilRelease release;
      for (;;) {
        Instant until = std::chrono::steady_clock::now() + kSlice;
        if (limit) until = std::min(until, start + *limit);
        ended = server_->wait(until);
        if (ended || signals.check() ||
            (limit && std::chrono::steady_clock::now() >= start + *limit))
          break;
      }
    }
    signals.rethrow();
    return ended;
  }

 private:
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

int run_master(const std::string& listen) {
  const auto secret = io::Secret::from_environment();
  if (!secret) raise(secret.error(), CallKind::collective, "run_master");
  Node node(listen, &*secret, 1);
  node.run();
  (void)node.wait(std::nullopt);
  return 0;
}

}  // namespace

void bind_master(nb::module_& m) {
  nb::class_<Node>(m, "Master")
      .def(nb::init<const std::string&, const io::Secret*, std::uint32_t>(), "listen"_a,
           nb::arg("secret").none() = nb::none(), "min_peers"_a = 1)
      .def("run", &Node::run)
      .def("address", &Node::address)
      .def("interrupt", &Node::interrupt)
      .def("wait", &Node::wait, nb::arg("timeout").none());
  m.def("run_master", &run_master, "listen"_a);
}

}  // namespace pccl::bindings

// The master's relay, with sockets that the test holds the other ends of.
#include "pccl/master/relay.h"

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "pccl/net/fork.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

pccl::PeerId id_of(const nb::bytes& bytes) {
  pccl::PeerId id;
  std::memcpy(id.bytes.data(), bytes.c_str(), std::min(bytes.size(), id.bytes.size()));
  return id;
}

class Desk {
 public:
  Desk(std::uint64_t rate, std::size_t most_open) : relays_(context_, rate, most_open) {}

  void expect(const nb::bytes& one, const nb::bytes& other, const nb::bytes& token_of_one,
              const nb::bytes& token_of_other) {
    relays_.expect(id_of(one), id_of(other), id_of(token_of_one), id_of(token_of_other), now_);
  }
  // The descriptor is the relay's from now on.
  bool enter(const nb::bytes& token, int descriptor) {
    const int own = pccl::net::open_descriptor([&] { return ::dup(descriptor); });
    ::close(descriptor);
    return relays_.enter(id_of(token), std::make_unique<pccl::net::Socket>(context_, own), now_);
  }
  void end(const nb::bytes& one, const nb::bytes& other) {
    relays_.end(id_of(one), id_of(other), now_);
  }
  // Of the clock of tokens.
  void wait(double seconds) {
    now_ += std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
    relays_.on_time(now_);
  }
  // Lets it work for so long at most; as long as there is anything to do.
  void run(double seconds) {
    const nb::gil_scoped_release release;
    context_.restart();
    context_.run_for(std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds)));
  }

 private:
  asio::io_context context_;
  pccl::Instant now_ = std::chrono::steady_clock::now();
  pccl::master::Relays relays_;
};

}  // namespace

void bind_relay(nb::module_& m) {
  nb::class_<Desk>(m, "RelayDesk")
      .def(nb::init<std::uint64_t, std::size_t>(), "rate"_a = 0, "most_open"_a = 512)
      .def("expect", &Desk::expect, "one"_a, "other"_a, "token_of_one"_a, "token_of_other"_a)
      .def("enter", &Desk::enter, "token"_a, "descriptor"_a)
      .def("end", &Desk::end, "one"_a, "other"_a)
      .def("wait", &Desk::wait, "seconds"_a)
      .def("run", &Desk::run, "seconds"_a);
}

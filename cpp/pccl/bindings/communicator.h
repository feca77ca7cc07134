// A communicator as Python holds it: the engine's, and the arrays of unfinished operations that
// have no handle any more.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pccl/bindings/common.h"

namespace pccl::bindings {

using Arrays = std::vector<Held>;

// All methods: REQUIRES the GIL.
struct CommunicatorHandle {
  explicit CommunicatorHandle(node::CommunicatorOptions options)
      : engine(std::make_shared<node::Communicator>(std::move(options))) {}
  ~CommunicatorHandle();
  CommunicatorHandle(const CommunicatorHandle&) = delete;
  CommunicatorHandle& operator=(const CommunicatorHandle&) = delete;

  // Keeps the arrays until the call is done.
  void keep(peer::CallPtr call, Arrays arrays);
  void drop_finished();
  // Runs on_change if it is due. Exceptions go to sys.unraisablehook: the call is over, and the
  // other members have its result. `signals` keeps those that are meant to end the program, such as
  // KeyboardInterrupt.
  void tell_changes(Signals& signals);

  std::shared_ptr<node::Communicator> engine;
  std::list<std::pair<peer::CallPtr, Arrays>> kept;
  std::size_t look_again = 0;  // when so many are kept, look at all of them
  // Of the latest plain reduction. The tuple is made once per membership.
  peer::Record contributors_of;
  // Called at the end of a call after which the membership is another one than notified_epoch, with
  // the epoch, this peer's rank, the members' ids and names, and the latest departures. It returns
  // functions without arguments, which are called then. Invalid: nobody asked.
  Held on_change;
  std::uint64_t notified_epoch = 0;
  nb::object contributors;
};

// Runs `call(engine, limit)`, which may block, without the GIL. REQUIRES: the GIL, before and
// after.
template <class Call>
auto without_gil(CommunicatorHandle& comm, Signals& signals, const Seconds& timeout,
                 const Call& call) {
  const node::Limit limit{duration(timeout), signals.hook()};
  const std::shared_ptr<node::Communicator> engine = comm.engine;
  auto result = [&] {
    const GilRelease release;
    return call(*engine, limit);
  }();
  if (comm.on_change.get().is_valid()) comm.tell_changes(signals);
  return result;
}

// The same, and raises its failure. An exception of a signal handler comes first.
template <class Call>
auto block(CommunicatorHandle& comm, const Seconds& timeout, CallKind kind, const char* function,
           const Call& call) {
  Signals signals;
  auto result = without_gil(comm, signals, timeout, call);
  signals.rethrow();
  if (!result) raise(result.error(), kind, function);
  if constexpr (!std::is_same_v<decltype(result), Status>) return *result;
}

// The members' ids, in rank order.
[[nodiscard]] std::vector<std::string> ids_of(const peer::Record& record);

void bind_sync(nb::module_& m, nb::class_<CommunicatorHandle>& communicator);

}  // namespace pccl::bindings

// A communicator as Python holds it: the engine's, and the arrays of operations whose handles are
// gone.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "pccl/bindings/common.h"
#include "pccl/node/communicator.h"

namespace pccl::bindings {

using Arrays = std::vector<nb::object>;

// All methods: REQUIRES the GIL.
struct Comm {
  explicit Comm(node::CommunicatorOptions options)
      : engine(std::make_shared<node::Communicator>(std::move(options))) {}
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Keeps the arrays until the call is done.
  void keep(peer::CallPtr call, Arrays arrays);
  void drop_finished();

  std::shared_ptr<node::Communicator> engine;
  std::list<std::pair<peer::CallPtr, Arrays>> kept;
  std::size_t look_again = 0;  // for finished ones behind others, when so many are kept
  // Of the latest plain reduction: the tuple is made once for a membership.
  peer::Record contributors_of;
  nb::object contributors;
};

void bind_sync(nb::module_& m, nb::class_<Comm>& communicator);

}  // namespace pccl::bindings

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// The outcome of a sync.
struct Synced {
  std::uint64_t revision = 0;
  std::uint64_t epoch = 0;
  std::vector<std::string> members;
  std::uint64_t tx_bytes = 0;
  std::uint64_t rx_bytes = 0;
  std::vector<std::string> written;  // names of entries with new bytes in their own memory
  nb::list replaced;                 // (name, kind, shape, containers, bytes)
  nb::list diverged;                 // (peer, names)
  Signals interrupt;                 // raised when it was too late to stop
  std::shared_ptr<node::Communicator> engine;
};

// An entry's memory: (address, bytes per element, shape, strides in bytes, reading, written).
using Layout = std::tuple<std::uint64_t, std::uint64_t, std::vector<std::uint64_t>,
                          std::vector<std::int64_t>, std::string, bool>;

state::Memory memory_at(const Layout& layout) {
  const auto& [address, item, shape, strides, reading, written] = layout;
  if (shape.size() != strides.size()) throw nb::value_error("as many strides as dimensions");
  state::Memory memory{address, item, {}, reading, written};
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] > 1) memory.axes.emplace_back(shape[axis], strides[axis]);
  }
  return memory;
}

// Entries: (name, kind, shape, containers, loose, bytes, writable, layout). `kept` keeps their
// memory alive.
std::vector<state::LocalEntry> take_entries(const nb::iterable& given,
                                            std::vector<nb::object>& kept) {
  std::vector<state::LocalEntry> entries;
  for (const nb::handle item : given) {
    const auto fields = nb::cast<nb::tuple>(item);
    if (fields.size() != 8) throw nb::value_error("an entry has eight fields");
    state::LocalEntry entry;
    entry.what.name = nb::cast<std::string>(fields[0]);
    entry.what.kind = nb::cast<std::string>(fields[1]);
    entry.what.shape = nb::cast<std::vector<std::uint64_t>>(fields[2]);
    entry.what.containers = nb::cast<std::string>(fields[3]);
    entry.what.loose = nb::cast<bool>(fields[4]);
    Bytes bytes;
    WritableBytes writable;
    if (nb::cast<bool>(fields[6])) {
      // No implicit conversion, which would make a copy: received bytes would go to the copy.
      if (!nb::try_cast(nb::handle(fields[5]), writable, false))
        throw nb::value_error("the bytes of an entry must be flat, C-contiguous and writable");
      entry.writable = writable.data();
    }
    if (!nb::try_cast(nb::handle(fields[5]), bytes, false))
      throw nb::value_error("the bytes of an entry must be flat and C-contiguous");
    entry.data = bytes.data();
    entry.what.bytes = bytes.size();
    if (!fields[7].is_none()) entry.memory = memory_at(nb::cast<Layout>(fields[7]));
    kept.emplace_back(nb::borrow(fields[5]));
    entries.push_back(std::move(entry));
  }
  return entries;
}

// Engine memory as a NumPy array that owns it.
nb::object to_array(BufferPtr buffer, std::size_t size) {
  auto* owned = new BufferPtr(std::move(buffer));
  const nb::capsule owner(owned,
                          [](void* memory) noexcept { delete static_cast<BufferPtr*>(memory); });
  return nb::cast(NewBytes((*owned)->data(), {size}, owner));
}

std::shared_ptr<Synced> sync(CommunicatorHandle& comm, const nb::iterable& given, int level,
                             std::optional<std::uint64_t> revision, int strategy,
                             const nb::object& progress, const nb::object& check, Seconds timeout,
                             bool lets_in, bool overwrite) {
  const char* function = level == 1 ? "sync_shared_state" : "sync";
  const CallKind kind = level == 1 ? CallKind::sync_shared_state : CallKind::sync;
  std::vector<nb::object> kept;
  std::vector<state::LocalEntry> entries = take_entries(given, kept);
  wire::SyncVote vote;
  vote.owned = level != 1;
  vote.has_revision = revision.has_value();
  vote.revision = revision.value_or(0);
  if (strategy < 0 || strategy > 2) throw nb::value_error("no such strategy");
  vote.strategy = static_cast<wire::SyncStrategy>(strategy);
  Signals signals;
  const node::Progress tell = [&](std::uint64_t done, std::uint64_t wanted) {
    signals.run([&] { const Held dropped(call(progress, done, wanted)); });
  };
  const node::StateCheck can_adopt = [&](const std::vector<wire::StateEntry>& offered) {
    std::optional<Error> answer;
    signals.run([&] {
      nb::list listed;
      for (const wire::StateEntry& what : offered) {
        listed.append(nb::make_tuple(text(what.name), text(what.kind),
                                     nb::tuple(nb::cast(what.shape)), text(what.containers),
                                     what.bytes));
      }
      const nb::object reason = call_with(check, listed);
      answer.emplace(Error{Code::ok, {}});
      if (!reason.is_none()) *answer = {Code::mismatched_call, nb::cast<std::string>(reason)};
    });
    return answer;
  };
  const auto call =
      without_gil(comm, signals, timeout, [&](node::Communicator& engine, const auto& limit) {
        return engine.sync(std::move(entries), vote, progress.is_none() ? node::Progress() : tell,
                           check.is_none() ? node::StateCheck() : can_adopt, limit,
                           {.lets_in = lets_in, .overwrite = overwrite});
      });
  if (!call) {
    signals.rethrow();
    raise(call.error(), kind, function);
  }
  auto result = std::make_shared<Synced>();
  state::Update& update = *(*call)->update;
  result->revision = update.decision.revision;
  result->tx_bytes = update.tx_bytes;
  result->rx_bytes = update.rx_bytes;
  result->written = std::move(update.written);
  if (const peer::Record& record = (*call)->record; record != nullptr) {
    result->epoch = record->epoch;
    result->members = ids_of(record);
  }
  for (state::Update::Replacement& replacement : update.replacements) {
    const wire::StateEntry& what = replacement.what;
    result->replaced.append(nb::make_tuple(
        text(what.name), text(what.kind), nb::tuple(nb::cast(what.shape)), text(what.containers),
        to_array(std::move(replacement.bytes), static_cast<std::size_t>(what.bytes))));
  }
  for (const wire::Divergence& found : update.decision.diverged)
    result->diverged.append(nb::make_tuple(found.peer.hex(), texts(found.names)));
  result->interrupt = std::move(signals);
  result->engine = comm.engine;
  return result;
}

// (name, name) of entries that are the same memory, and why they cannot be shared, if so.
std::pair<std::vector<std::pair<std::string, std::string>>, std::optional<std::string>> find_ties(
    const nb::iterable& given) {
  std::vector<nb::object> kept;
  std::vector<state::LocalEntry> entries = take_entries(given, kept);
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.what.name < b.what.name; });
  std::string flaw = state::find_ties(entries, {}).value_or("");
  std::vector<std::pair<std::string, std::string>> ties;
  for (const state::LocalEntry& entry : entries) {
    if (!entry.what.tie.empty()) ties.emplace_back(entry.what.name, entry.what.tie);
  }
  return {std::move(ties), flaw.empty() ? std::nullopt : std::optional(std::move(flaw))};
}

}  // namespace

void bind_sync(nb::module_& m, nb::class_<CommunicatorHandle>& communicator) {
  nb::class_<Synced>(m, "Synced")
      .def_ro("revision", &Synced::revision)
      .def_ro("epoch", &Synced::epoch)
      .def_ro("members", &Synced::members)
      .def_ro("tx_bytes", &Synced::tx_bytes)
      .def_ro("rx_bytes", &Synced::rx_bytes)
      .def_ro("written", &Synced::written)
      .def_ro("replaced", &Synced::replaced)
      .def_ro("diverged", &Synced::diverged)
      .def("finish", [](Synced& synced) {
        // An interrupted caller does not get the replaced entries.
        if (synced.replaced.size() == 0) synced.engine->took_over();
        synced.interrupt.rethrow();
        synced.engine->took_over();
      });
  m.def("find_ties", &find_ties, "entries"_a);
  communicator.def("overwrote", [](CommunicatorHandle& comm) { return comm.engine->overwrote(); });
  communicator.def("sync", &sync, "entries"_a, nb::kw_only(), "level"_a, nb::arg("revision").none(),
                   "strategy"_a, nb::arg("progress").none(), nb::arg("check").none(),
                   nb::arg("timeout").none(), "lets_in"_a = true, "overwrite"_a = false);
}

}  // namespace pccl::bindings

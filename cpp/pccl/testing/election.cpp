// Whose state counts, with peers and contents as small numbers; and manifests of bytes.
#include "pccl/state/election.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/state/manifest.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace state = pccl::state;
namespace wire = pccl::wire;

namespace {

using Entries = std::vector<std::pair<std::string, std::string>>;  // (name, kind)
// (peer, revision, strategy, content, entries)
using Vote =
    std::tuple<std::uint8_t, std::optional<std::uint64_t>, unsigned, std::uint64_t, Entries>;

pccl::PeerId peer(std::uint8_t number) {
  pccl::PeerId id;
  id.bytes[0] = number;
  return id;
}

std::vector<std::uint8_t> numbers(const std::vector<pccl::PeerId>& peers) {
  std::vector<std::uint8_t> found;
  for (const pccl::PeerId& id : peers) found.push_back(id.bytes[0]);
  return found;
}

// `holders`: of the state before, with its revision; nothing: there was none.
nb::dict judge(const std::vector<Vote>& votes, std::optional<std::uint64_t> revision,
               const std::vector<std::uint8_t>& holders, bool owned, bool details) {
  wire::StateRecord record;
  record.exists = revision.has_value();
  record.revision = revision.value_or(0);
  for (const std::uint8_t holder : holders) record.holders.push_back(peer(holder));
  std::vector<std::vector<wire::StateEntry>> entries;
  entries.reserve(votes.size());
  std::vector<state::Ballot> ballots;
  for (const auto& [number, own, strategy, content, names] : votes) {
    entries.emplace_back();
    for (const auto& [name, kind] : names) {
      wire::StateEntry entry;
      entry.name = name;
      entry.kind = kind;
      entry.content = {content, 0};
      entries.back().push_back(std::move(entry));
    }
    state::Ballot ballot;
    ballot.peer = peer(number);
    ballot.vote.owned = owned;
    ballot.vote.has_revision = own.has_value();
    ballot.vote.revision = own.value_or(0);
    ballot.vote.strategy = static_cast<wire::SyncStrategy>(strategy);
    ballot.vote.content = {content, 0};
    ballot.vote.structure = state::structure_of(entries.back());
    ballot.entries = &entries.back();
    ballots.push_back(ballot);
  }
  const state::Judgement judgement =
      details ? state::judge_details(ballots, record) : state::judge_votes(ballots, record);
  std::vector<std::pair<std::uint8_t, unsigned>> removals;
  for (const state::Removal& removal : judgement.removals)
    removals.emplace_back(removal.peer.bytes[0], static_cast<unsigned>(removal.code));
  nb::dict result;
  result["removals"] = removals;
  result["code"] = static_cast<unsigned>(judgement.code);
  result["culprit"] = judgement.culprit.bytes[0];
  result["reason"] = judgement.reason;
  result["step"] = static_cast<unsigned>(judgement.decision.step);
  result["revision"] = judgement.decision.revision;
  result["content"] = judgement.decision.content.low;
  result["holders"] = numbers(judgement.decision.holders);
  result["receivers"] = numbers(judgement.decision.receivers);
  result["newcomers"] = numbers(judgement.decision.newcomers);
  std::vector<std::uint8_t> diverged;
  for (const wire::Divergence& found : judgement.decision.diverged)
    diverged.push_back(found.peer.bytes[0]);
  result["diverged"] = diverged;
  return result;
}

// Places of the chunks of entries of these sizes: (entry, offset, bytes) by number.
std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> chunk_places(
    const std::vector<std::uint64_t>& sizes) {
  std::vector<wire::StateEntry> entries(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) entries[i].bytes = sizes[i];
  const state::ChunkIndex index(entries);
  std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> places;
  for (std::uint64_t chunk = 0; chunk < index.count(); ++chunk) {
    const state::ChunkPlace place = index.at(chunk);
    places.emplace_back(place.entry, place.offset, place.bytes);
  }
  return places;
}

}  // namespace

void bind_election(nb::module_& m) {
  m.def("judge_state", &judge, "votes"_a, nb::arg("revision").none(), "holders"_a, nb::kw_only(),
        "owned"_a, "details"_a);
  m.def("chunk_places", &chunk_places, "sizes"_a);
}

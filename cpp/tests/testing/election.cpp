// Elections with small numbers as peers and contents, and manifests of bytes.
#include "pccl/state/election.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/master/group.h"
#include "pccl/state/manifest.h"
#include "tests/nobody.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace state = pccl::state;
namespace wire = pccl::wire;
using pccl::tests::peer;

namespace {

using Entries =
    std::vector<std::tuple<std::string, std::string, std::string>>;  // (name, kind, tie)
// (peer, revision, strategy, content, entries, member since, worked since, whole,
// mixed)
using Vote = std::tuple<std::uint8_t, std::optional<std::uint64_t>, unsigned, std::uint64_t,
                        Entries, std::uint64_t, std::uint64_t, bool, bool>;

std::vector<std::uint8_t> numbers(const std::vector<pccl::PeerId>& peers) {
  std::vector<std::uint8_t> found;
  for (const pccl::PeerId& id : peers) found.push_back(id.bytes[0]);
  return found;
}

nb::dict to_python(const state::Judgement& judgement) {
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

// `holders`: of the previous state, whose revision is `revision`; none: there was no state.
nb::dict judge(const std::vector<Vote>& votes, std::optional<std::uint64_t> revision,
               const std::vector<std::uint8_t>& holders, bool owned, bool details,
               const std::map<std::uint8_t, std::string>& flaws) {
  wire::StateRecord record;
  record.exists = revision.has_value();
  record.revision = revision.value_or(0);
  for (const std::uint8_t holder : holders) record.holders.push_back(peer(holder));
  std::vector<std::vector<wire::StateEntry>> entries;
  entries.reserve(votes.size());
  std::vector<state::Ballot> ballots;
  for (const auto& [number, own, strategy, content, names, member_since, worked_since, whole,
                    mixed] : votes) {
    entries.emplace_back();
    for (const auto& [name, kind, tie] : names) {
      wire::StateEntry entry;
      entry.name = name;
      entry.kind = kind;
      entry.tie = tie;
      entry.content = {content, 0};
      entries.back().push_back(std::move(entry));
    }
    state::Ballot ballot;
    ballot.peer = peer(number);
    ballot.name = ballot.peer.brief();
    ballot.vote.owned = owned;
    ballot.vote.has_revision = own.has_value();
    ballot.vote.revision = own.value_or(0);
    ballot.vote.strategy = static_cast<wire::SyncStrategy>(strategy);
    ballot.vote.content = {content, 0};
    ballot.vote.member_since = member_since;
    ballot.vote.worked_since = worked_since;
    ballot.vote.whole = whole;
    ballot.vote.mixed = mixed;
    if (const auto flaw = flaws.find(number); flaw != flaws.end()) ballot.vote.flaw = flaw->second;
    ballot.vote.structure = state::structure_of(entries.back());
    ballot.entries = &entries.back();
    ballots.push_back(ballot);
  }
  return to_python(details ? state::judge_details(ballots, record)
                           : state::judge_votes(ballots, record));
}

// Ends: (peer, code, revision, content, lost).
using End =
    std::tuple<std::uint8_t, unsigned, std::uint64_t, std::uint64_t, std::vector<std::uint8_t>>;

nb::dict judge_ends(const std::vector<End>& given) {
  std::vector<state::End> ends;
  for (const auto& [number, code, revision, content, lost] : given) {
    wire::SyncEnd end{static_cast<pccl::Code>(code), "why", revision, {content, 0}, {}};
    for (const std::uint8_t source : lost) end.lost.push_back(peer(source));
    ends.push_back({peer(number), peer(number).brief(), std::move(end)});
  }
  return to_python(state::judge_ends(ends));
}

// One of two members enters rounds (kind, sequence, bytes) of a sync, with an entry whose name has
// `bytes` bytes. Returns for each round whether it is still a member.
std::vector<bool> enter_rounds(
    const std::vector<std::tuple<unsigned, std::uint64_t, std::size_t>>& rounds,
    std::uint64_t max_open_bytes) {
  pccl::tests::Nobody around;
  pccl::master::Options options;
  options.limits.max_open_bytes = max_open_bytes;
  pccl::master::Group group(0, options, around);
  const pccl::Instant now{};
  for (std::uint8_t number = 1; number <= 2; ++number) {
    wire::Join join;
    join.id = peer(number);
    join.min_peers = 2;
    join.waiting = true;
    group.add_candidate(number, join, {}, now);
  }
  std::vector<bool> stays;
  for (const auto& [kind, sequence, bytes] : rounds) {
    wire::RoundEntry entry;
    entry.key = {static_cast<wire::RoundKind>(kind), group.record().admission, sequence};
    if (entry.key.kind == wire::RoundKind::sync) entry.payload = wire::SyncVote{};
    if (entry.key.kind == wire::RoundKind::sync_end) entry.payload = wire::SyncEnd{};
    if (entry.key.kind == wire::RoundKind::sync_detail) {
      wire::SyncDetail detail;
      detail.entries.resize(1);
      detail.entries[0].name = std::string(bytes, 'x');
      entry.payload = std::move(detail);
    }
    group.on_message(1, {{}, wire::EnterRound{entry}}, now);
    stays.push_back(group.knows(1));
  }
  return stays;
}

// Entries are (name, kind, shape, bytes, writable).
using Form = std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::uint64_t, bool>;

// Whether a member with the entries `own` accepts a manifest of these entries. On both sides the
// entry `tied`, if it is named, is the memory of the entry `to`.
bool manifest_fits(const std::vector<Form>& theirs, const std::vector<Form>& own,
                   const std::string& tied, const std::string& to) {
  const auto entry_of = [&](const Form& form) {
    wire::StateEntry entry;
    std::tie(entry.name, entry.kind, entry.shape, entry.bytes, std::ignore) = form;
    if (entry.name == tied) entry.tie = to;
    return entry;
  };
  state::Manifest manifest;
  for (const Form& form : theirs) {
    wire::StateEntry entry = entry_of(form);
    const std::uint64_t count = std::min<std::uint64_t>(state::chunk_count(entry.bytes), 1000);
    const std::vector<wire::Digest> chunks(count);
    entry.content = state::entry_content(entry, chunks);
    manifest.entries.push_back(std::move(entry));
    manifest.chunks.insert(manifest.chunks.end(), chunks.begin(), chunks.end());
  }
  std::uint8_t memory = 0;
  std::vector<state::LocalEntry> mine;
  for (const Form& form : own)
    mine.push_back({entry_of(form), &memory, std::get<4>(form) ? &memory : nullptr, {}});
  return state::valid(manifest, state::content_of(manifest.entries, false), mine);
}

// The ranges of the chunks of entries of these sizes: (entry, offset, bytes) by number.
std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> chunk_places(
    const std::vector<std::uint64_t>& sizes) {
  std::vector<wire::StateEntry> entries(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) entries[i].bytes = sizes[i];
  const state::ChunkIndex index(entries);
  std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>> ranges;
  for (std::uint64_t chunk = 0; chunk < index.count(); ++chunk) {
    const state::ChunkRange range = index.at(chunk);
    ranges.emplace_back(range.entry, range.offset, range.bytes);
  }
  return ranges;
}

// (address, bytes of an element, (count, stride in bytes) by axis)
using Array =
    std::tuple<std::uint64_t, std::uint64_t, std::vector<std::pair<std::uint64_t, std::int64_t>>>;

bool overlap(const Array& a, const Array& b) {
  const auto memory = [](const Array& array) {
    return state::Memory{std::get<0>(array), std::get<1>(array), std::get<2>(array), {}, true};
  };
  return state::overlap(memory(a), memory(b));
}

}  // namespace

void bind_election(nb::module_& m) {
  m.def("judge_state", &judge, "votes"_a, nb::arg("revision").none(), "holders"_a, nb::kw_only(),
        "owned"_a, "details"_a, "flaws"_a);
  m.def("judge_ends", &judge_ends, "ends"_a);
  m.def("enter_rounds", &enter_rounds, "rounds"_a, "max_open_bytes"_a);
  m.def("manifest_fits", &manifest_fits, "theirs"_a, "own"_a, "tied"_a = "", "to"_a = "");
  m.def("overlap", &overlap, "a"_a, "b"_a);
  m.def("chunk_places", &chunk_places, "sizes"_a);
}

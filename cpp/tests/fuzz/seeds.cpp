// Writes the initial corpus of the fuzz targets into FOLDER/<target>/: scripts of real messages, so
// that they follow the protocol.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "arrays.h"
#include "fuzz.h"
#include "pccl/digest/ticket.h"
#include "pccl/link/frame.h"
#include "pccl/memory/board.h"
#include "pccl/memory/pipe.h"
#include "pccl/node/neighbour_packet.h"
#include "pccl/state/transfer.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/messages.h"

namespace pccl::fuzz {
namespace {

std::filesystem::path folder;

void seed(const std::string& target, const std::string& name, const wire::Bytes& bytes) {
  std::filesystem::create_directories(folder / target);
  std::ofstream file(folder / target / name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!file) {
    std::perror("cannot write a seed");
    std::exit(1);
  }
}

wire::EpochRecord record() {
  wire::EpochRecord record;
  record.epoch = record.admission = record.abort_floor = 1;
  for (std::uint8_t id = 1; id <= 3; ++id)
    record.members.push_back(
        {peer(id), id, {{"192.0.2.1", 1}}, {}, {}, digest::seal_of({peer(id).bytes})});
  record.plan = *topology::make_plan(3, 512 << 10, {});
  record.state = {true, 7, {1, 2}, {peer(1)}};
  return record;
}

wire::Join join(std::uint8_t id) {
  wire::Join join;
  join.id = peer(id);
  join.waiting = true;
  join.addresses = {{"192.0.2.1", 4000}, {"2001:db8::1", 4000}};
  join.software = "pccl";
  join.ticket = {join.id.bytes};
  return join;
}

wire::Rejoin rejoin(std::uint8_t id) {
  wire::Rejoin rejoin;
  rejoin.id = peer(id);
  rejoin.ticket = {rejoin.id.bytes};
  rejoin.record = record();
  rejoin.applied = 9;
  return rejoin;
}

wire::LogPart log_part() {
  return {{{8, record()}, {9, wire::Verdict{{1, false, 0, 3}, 1, Code::ok, false, {}, {}, {}}}},
          true};
}

// One of each message that a member may send.
std::vector<wire::Message> messages() {
  const wire::OpKey operation{1, true, 7, 2};
  wire::SyncDetail detail;
  detail.entries = {{"w", "float32", {2, 3}, "", 24, false, "", {1, 2}}};
  std::vector<wire::Message> all = {join(4),
                                    rejoin(1),
                                    log_part(),
                                    wire::RequestAdmission{},
                                    wire::Prepared{1, {}},
                                    wire::Heartbeat{},
                                    wire::WithdrawAdmission{},
                                    wire::Leave{"over"},
                                    wire::AskStatus{},
                                    wire::Command{wire::CommandKind::kick, "a"},
                                    wire::Command{wire::CommandKind::pause_admission, {}}};
  for (const wire::RoundPayload& payload :
       {wire::RoundPayload(wire::Nothing{}), wire::RoundPayload(wire::SyncVote{}),
        wire::RoundPayload(detail),
        wire::RoundPayload(wire::SyncEnd{Code::peer_lost, "gone", 7, {1, 2}, {peer(2)}}),
        wire::RoundPayload(wire::Measurements{{{peer(2), {false, 1000, 20}}}, {5000, 5000}})}) {
    const wire::RoundKind kinds[] = {wire::RoundKind::admit, wire::RoundKind::sync,
                                     wire::RoundKind::sync_detail, wire::RoundKind::sync_end,
                                     wire::RoundKind::optimize};
    all.push_back(wire::EnterRound{{{kinds[payload.index()], 1, 0}, payload}});
  }
  all.push_back(wire::OpReport{{{operation, 1, wire::OpPhase::entered, true, {5, "4 float32, sum"}},
                                {operation, 1, wire::OpPhase::done, true, {5, "4 float32, sum"}}}});
  all.push_back(wire::AbortRequest{wire::CallKey(operation), Code::timeout, {}});
  for (const auto state :
       {wire::LinkState::broken, wire::LinkState::unreachable, wire::LinkState::silent,
        wire::LinkState::mended, wire::LinkState::relayed})
    all.push_back(wire::LinkReport{peer(2), state, 1, "reset"});
  all.push_back(wire::Blocked{{wire::CallKey(operation)}, true, false, false});
  all.push_back(wire::Neighbourhood{{peer(2), peer(3)}, 0});
  all.push_back(wire::Measured{{{{peer(2), {false, 1000, 20}}}, {5000, 5000}}});
  return all;
}

// A step of control.cpp's script: a message from connection `from`.
void say(Scribe& script, std::uint8_t from, const wire::Message& message) {
  const wire::Bytes bytes = wire::encode({}, message);
  script.byte(5)
      .byte(static_cast<std::uint8_t>(from - 1))
      .byte(static_cast<std::uint8_t>(message.index()))
      .byte(0);
  script.piece(std::span(bytes).subspan(wire::kHeaderBytes));
}

void control() {
  wire::Bytes stream = {0};
  const std::vector<wire::Message> all = messages();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string name = std::to_string(i);
    const wire::Bytes bytes = wire::encode({77, 3, 1}, all[i]);
    stream.insert(stream.end(), bytes.begin(), bytes.end());
    for (std::uint8_t members = 1; members <= 3; ++members) {
      Scribe script;
      script.byte(2);
      for (std::uint8_t from = 1; from <= members; ++from) say(script, from, all[i]);
      script.byte(1).byte(0).byte(100);
      seed("control", "said-" + name + "-by-" + std::to_string(members), script.bytes());
    }
  }
  seed("control", "stream", stream);
  Scribe newcomer;
  newcomer.byte(2);
  say(newcomer, 4, join(4));
  say(newcomer, 4, wire::Prepared{1, {}});
  for (std::uint8_t from = 1; from <= 3; ++from)
    say(newcomer, from, wire::EnterRound{{{wire::RoundKind::admit, 1, 0}, wire::Nothing{}}});
  seed("control", "newcomer", newcomer.bytes());
  Scribe restarted;
  restarted.byte(1);
  for (std::uint8_t from = 1; from <= 3; ++from) say(restarted, from, rejoin(from));
  restarted.byte(1).byte(0).byte(255);
  say(restarted, 1, log_part());
  say(restarted, 1,
      wire::OpReport{{{{1, false, 0, 4}, 1, wire::OpPhase::done, true, {5, "4 float32, sum"}}}});
  seed("control", "restarted", restarted.bytes());
}

// A step of link.cpp's script.
void frame(Scribe& script, std::uint8_t stripe, link::FrameType type, std::uint8_t flags,
           std::uint8_t sequence, std::uint8_t segment, std::size_t credit,
           std::span<const std::uint8_t> payload, int blocks = -1) {
  script.byte(6)
      .byte(stripe)
      .byte(static_cast<std::uint8_t>(type))
      .byte(flags)
      .byte(sequence)
      .byte(segment);
  script.pair(credit).piece(payload);
  if (blocks >= 0) script.byte(static_cast<std::uint8_t>(blocks));
}

void links() {
  const wire::Bytes lost = wire::encoded(link::Lost{1, 0, 3});
  const wire::Bytes fetch = wire::encoded(state::Fetch{true, false, {0, 1}});
  const wire::Bytes located = wire::encoded(state::Located{{{0, {1, 0}}, {1, {2, 64}}}});
  const wire::Bytes some(200, 1);
  for (std::uint8_t mode = 0; mode < 16; ++mode) {
    Scribe script;
    script.byte(mode);
    for (std::uint8_t type = 0; type < enum_count(link::FrameType{}); ++type) {
      Scribe one;
      one.byte(mode);
      for (Scribe* into : {&script, &one}) {
        const auto kind = static_cast<link::FrameType>(type);
        const bool data = link::carries_data(kind);
        const auto& payload = kind == link::FrameType::lost      ? lost
                              : kind == link::FrameType::fetch   ? fetch
                              : kind == link::FrameType::located ? located
                                                                 : some;
        for (std::uint8_t stripe = 0; stripe < 2; ++stripe) {
          for (std::uint8_t final = 0; final < 2; ++final)
            frame(*into, stripe, kind, static_cast<std::uint8_t>((data ? 64 : 0) | final), 0,
                  stripe, 4, payload, data ? 26 : -1);
        }
      }
      seed("link", "frame-" + std::to_string(type) + "-mode-" + std::to_string(mode), one.bytes());
    }
    seed("link", "all-mode-" + std::to_string(mode), script.bytes());
  }
  Scribe again;
  again.byte(0).byte(1).byte(0).byte(3).byte(0).byte(36).byte(2).byte(1).byte(200).byte(5).byte(0);
  frame(again, 0, link::FrameType::ready, 0, 0, 0, 0xffff, {});
  again.byte(2).byte(0).byte(255);
  seed("link", "connects-again", again.bytes());
}

void manifests() {
  const Arrays theirs(8);
  const wire::Bytes fetch = wire::encoded(state::Fetch{true, false, {0, 1, 2}});
  Scribe receives;
  receives.byte(1).byte(0x10 | 3).piece(wire::encoded(theirs.state->manifest));
  for (std::uint8_t holder = 1; holder <= 2; ++holder)
    receives.byte(static_cast<std::uint8_t>(holder << 4)).byte(1);
  for (std::uint8_t holder = 1; holder <= 2; ++holder) {
    const auto at = static_cast<std::uint8_t>(holder << 4);
    receives.byte(at | 2);
    for (std::uint8_t chunk = 0; chunk < 3; ++chunk)
      receives.byte(at | 5).byte(2).byte(chunk).pair(0);
  }
  receives.byte(1).byte(20);
  seed("manifest", "receives", receives.bytes());
  Scribe serves;
  serves.byte(0);
  for (std::uint8_t receiver = 1; receiver <= 2; ++receiver) {
    const auto at = static_cast<std::uint8_t>(receiver << 4);
    serves.byte(at | 13).piece(fetch).byte(at | 2);
  }
  seed("manifest", "serves", serves.bytes());
  // Overwriting or not, waiting for the caller or not.
  for (std::uint8_t how = 1; how < 16; how += 4) {
    Scribe reads;
    reads.byte(how).byte(0x10 | 3).piece(wire::encoded(theirs.state->manifest)).byte(0x10 | 11);
    reads.byte(0x10 | 9).byte(3);
    for (std::uint8_t chunk = 0; chunk < 3; ++chunk) reads.byte(chunk).byte(1).pair(0);
    reads.byte(0x10 | 10);
    seed("manifest", "reads-" + std::to_string(how), reads.bytes());
  }
  Scribe loses;
  loses.byte(1)
      .byte(0x10 | 3)
      .piece(wire::encoded(theirs.state->manifest))
      .byte(0x10 | 4)
      .byte(0x20 | 3);
  loses.piece(wire::encoded(theirs.state->manifest))
      .byte(0x20)
      .byte(1)
      .byte(0x20 | 5)
      .byte(1)
      .byte(1)
      .pair(0);
  seed("manifest", "loses-a-holder", loses.bytes());
}

void neighbours() {
  // For each kind of offer, the bits that make the target pass memory of the right size and seals.
  const std::pair<int, std::size_t> passed[] = {
      {0x30, memory::kBoardBytes},   {0x60, memory::kPageBytes},   {0xf0, 4096}, {0xf0, 4096},
      {0xb0, memory::kPipeEndBytes}, {0xb0, memory::kPipeEndBytes}};
  for (std::uint8_t kind = 0; kind < 6; ++kind) {
    for (std::uint8_t offer = 0; offer < 6; ++offer) {
      node::NeighbourPacket packet;
      packet.kind = static_cast<node::NeighbourPacket::Kind>(kind);
      packet.size = passed[offer].second;
      packet.offer = offer;
      Scribe script;
      script.byte(2).byte(0).piece({});
      script.byte(2).byte(static_cast<std::uint8_t>(4 | passed[offer].first));
      script.piece({reinterpret_cast<const std::uint8_t*>(&packet), sizeof packet});
      seed("neighbours", "packet-" + std::to_string(kind) + "-" + std::to_string(offer),
           script.bytes());
    }
  }
}

}  // namespace

}  // namespace pccl::fuzz

int main(int argc, char** argv) {
  using namespace pccl::fuzz;
  if (argc != 2) {
    std::fprintf(stderr, "usage: pccl_fuzz_seeds FOLDER\n");
    return 2;
  }
  folder = argv[1];
  control();
  links();
  manifests();
  neighbours();
  return 0;
}

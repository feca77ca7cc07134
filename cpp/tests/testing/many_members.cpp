// The processor time that a master takes for hundreds of members: benchmarks/master.py. A loop
// sends it the messages of the members.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/master/master.h"
#include "pccl/wire/messages.h"

#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
#include <malloc.h>
#define PCCL_TESTS_MALLINFO
#endif
#endif

namespace nb = nanobind;
using namespace nb::literals;
namespace master = pccl::master;
namespace wire = pccl::wire;
using pccl::PeerId;

namespace {

PeerId numbered(std::uint32_t number) {
  PeerId id;
  id.bytes.fill(0xaa);
  std::memcpy(id.bytes.data(), &number, sizeof number);
  return id;
}

double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Bytes that are allocated, 0 where the C library does not tell.
std::size_t allocated() {
#ifdef PCCL_TESTS_MALLINFO
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
#else
  return 0;
#endif
}

// Each step returns (seconds of the master, bytes that it sends): from the bytes of the members'
// messages to those of the answers, without sockets and encryption.
using Cost = std::tuple<double, std::size_t>;

// The members of group 0, each on a connection of its own. *one thread*
class ManyMembers final {
 public:
  explicit ManyMembers(std::uint32_t members)
      : founders_(members), before_(allocated()), master_(std::in_place, options_, kRun, 1) {}
  ManyMembers(const ManyMembers&) = delete;
  ManyMembers& operator=(const ManyMembers&) = delete;

  // All founders join.
  Cost start() {
    std::vector<Said> said;
    for (std::uint32_t i = 0; i < founders_; ++i) said.push_back(join(founders_));
    const Cost cost = hear(said);
    expect(size() == founders_, "a group of all founders");
    return cost;
  }

  // One operation over TCP, until all have its verdict.
  Cost call() {
    std::vector<Said> said;
    wire::OpState state;
    state.key = {record().admission, false, 0, calls_++};
    state.attempt = record().epoch;
    state.phase = wire::OpPhase::done;
    state.rerun = true;
    state.signature = {99, "1000 float32, sum"};
    for (const wire::Member& member : record().members)
      said.push_back({connection(member.id), wire::OpReport{{state}}});
    const std::uint64_t last = group().log().last();
    const Cost cost = hear(said);
    expect(group().log().last() == last + 1, "a verdict");
    return cost;
  }

  // A heartbeat of every member.
  Cost heartbeats() {
    std::vector<Said> said;
    for (const wire::Member& member : record().members)
      said.push_back({connection(member.id), wire::Heartbeat{}});
    return hear(said);
  }

  // The member of the middle rank dies; all others report their links to it, until all of them have
  // the epoch without it.
  Cost lose() {
    const PeerId lost = record().members[size() / 2].id;
    const std::size_t before = size();
    std::vector<Said> said;
    for (const wire::Member& member : record().members) {
      if (member.id != lost)
        said.push_back({connection(member.id),
                        wire::LinkReport{lost, wire::LinkState::broken, record().epoch, "reset"}});
    }
    const double began = thread_cpu_seconds();
    master_->on_disconnect(connection(lost), now_);
    const double took = thread_cpu_seconds() - began;
    const auto [seconds, bytes] = hear(said);
    expect(size() == before - 1, "a group without the lost member");
    return {took + seconds, bytes};
  }

  // A newcomer joins, is prepared, and enters at the next admission point of all members.
  Cost admit() {
    const std::size_t before = size();
    std::vector<Said> said;
    said.push_back(join(1));
    const auto newcomer = said.back().from;
    const Cost joined = hear(said);
    const Cost prepared = hear({{newcomer, wire::Prepared{record().epoch, {}}}});
    said.clear();
    const wire::RoundKey key{wire::RoundKind::admit, record().admission, 0};
    for (const wire::Member& member : record().members)
      said.push_back({connection(member.id), wire::EnterRound{{key, wire::AdmissionPoint{}}}});
    const Cost entered = hear(said);
    expect(size() == before + 1, "a group with the newcomer");
    calls_ = 0;
    return {std::get<0>(joined) + std::get<0>(prepared) + std::get<0>(entered),
            std::get<1>(joined) + std::get<1>(prepared) + std::get<1>(entered)};
  }

  // The master is replaced by one without a memory of the run, and all members come back to it.
  Cost restart() {
    const wire::EpochRecord known = record();
    const std::uint64_t applied = group().log().last();
    const std::size_t before = size();
    run_ = master_->run();
    master_.emplace(options_, run_ + 1, 1);
    applied_ = applied;
    std::vector<Said> said;
    for (const wire::Member& member : known.members) {
      const std::uint32_t number = number_of(member.id);
      said.push_back({number, wire::Rejoin{member.id, 0, known, applied, {member.id.bytes}}, true});
    }
    const auto [seconds, bytes] = hear(said);
    // One of them is asked for its log, which is empty as all members have applied it.
    const Cost logged = hear({{asked_, wire::LogPart{{}, true}}});
    expect(size() == before, "the same group");
    return {seconds + std::get<0>(logged), bytes + std::get<1>(logged)};
  }

  // Bytes of memory for each member, of all that the master keeps.
  double memory() const {
    const auto grown = static_cast<std::int64_t>(allocated()) - static_cast<std::int64_t>(before_);
    return static_cast<double>(grown) / static_cast<double>(size());
  }
  std::size_t size() const { return group().record().members.size(); }

 private:
  struct Said {
    master::ConnectionId from = 0;
    wire::Message message;
    bool connects = false;
  };

  static void expect(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(std::string("many members: expected ") + what);
  }
  static std::uint32_t number_of(const PeerId& id) {
    std::uint32_t number = 0;
    std::memcpy(&number, id.bytes.data(), sizeof number);
    return number;
  }
  static master::ConnectionId connection(const PeerId& id) { return number_of(id); }
  const master::Group& group() const { return *master_->group(0); }
  const wire::EpochRecord& record() const { return group().record(); }

  Said join(std::uint32_t min_peers) {
    const std::uint32_t number = next_++;
    wire::Join join;
    join.id = numbered(number);
    join.ticket = {join.id.bytes};
    join.min_peers = min_peers;
    join.waiting = true;
    join.addresses = {{"192.0.2.1", 48148}, {"2001:db8::1234:5678", 48148}};
    join.software = "pccl 0.1.0";
    join.name = "trainer-" + std::to_string(number);
    return {number, std::move(join), true};
  }

  // Hands the master what the members say, one after the other, and drops its answers.
  Cost hear(const std::vector<Said>& said) {
    const std::uint64_t applied = master_->group(0) != nullptr ? group().log().last() : applied_;
    std::vector<wire::Bytes> encoded;
    for (const Said& one : said)
      encoded.push_back(wire::encode({run_, master_->term(), applied}, one.message));
    now_ += std::chrono::milliseconds(20);
    const std::size_t request_log = wire::Message(wire::RequestLog{}).index();
    std::size_t bytes = 0;
    const double began = thread_cpu_seconds();
    for (std::size_t i = 0; i < said.size(); ++i) {
      const master::ConnectionId from = said[i].from;
      if (said[i].connects)
        master_->on_connect(from, "192.0.2." + std::to_string(from % 250), now_);
      wire::FrameReader reader;
      reader.feed(encoded[i]);
      wire::Frame frame;
      const auto next = reader.next(frame);
      expect(next && *next, "a message that can be read");
      master_->on_frame(from, frame, now_);
      for (const master::Action& action : master_->take_actions()) {
        if (const auto* send = std::get_if<master::Send>(&action)) {
          bytes += send->bytes.size();
          if (send->bytes[5] == request_log) asked_ = send->to;
        }
        expect(!std::holds_alternative<master::Close>(action), "that nobody is refused");
      }
    }
    return {thread_cpu_seconds() - began, bytes};
  }

  static constexpr std::uint64_t kRun = 77;

  master::Options options_;
  std::uint32_t founders_ = 0;
  std::size_t before_ = 0;
  std::uint64_t run_ = kRun;  // of the members
  std::uint32_t next_ = 1;
  std::uint64_t calls_ = 0;
  std::uint64_t applied_ = 0;
  master::ConnectionId asked_ = 0;
  pccl::Instant now_{std::chrono::seconds(1000)};
  std::optional<master::Master> master_;
};

}  // namespace

void bind_many_members(nb::module_& m);
void bind_many_members(nb::module_& m) {
  nb::class_<ManyMembers>(m, "ManyMembers")
      .def(nb::init<std::uint32_t>(), "members"_a)
      .def("start", &ManyMembers::start)
      .def("call", &ManyMembers::call)
      .def("heartbeats", &ManyMembers::heartbeats)
      .def("lose", &ManyMembers::lose)
      .def("admit", &ManyMembers::admit)
      .def("restart", &ManyMembers::restart)
      .def("memory", &ManyMembers::memory)
      .def("size", &ManyMembers::size);
}

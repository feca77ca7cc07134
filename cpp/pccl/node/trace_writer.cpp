#include "pccl/node/trace_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/text.h"
#include "pccl/io/thread.h"
#include "pccl/os/process.h"

namespace pccl::node {
namespace {

constexpr std::size_t kMaxQueued = 1 << 16;  // events
constexpr Duration kFlushEvery = std::chrono::milliseconds(250);
constexpr std::size_t kFlushBytes = 1 << 18;
// Parts of a call that are shorter are in its arguments only. No viewer shows them, and writing
// them would take longer than they did.
constexpr Duration kShortest = std::chrono::microseconds(50);
constexpr int kFirstLinkLane = 1000;  // calls come first
constexpr std::size_t kMaxCallLanes = 64;

std::int64_t nanoseconds(Instant at) { return at.time_since_epoch().count(); }

// Written as microseconds with three decimals.
struct Microseconds {
  std::int64_t nanoseconds;
};
Microseconds between(Instant begin, Instant end) {
  return {std::max<std::int64_t>(nanoseconds(end) - nanoseconds(begin), 0)};
}

void add(std::string& text, std::string_view part) { text.append(part); }
void add(std::string& text, std::uint64_t number) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  text.append(digits.data(), end);
}
void add(std::string& text, Microseconds time) {
  add(text, static_cast<std::uint64_t>(time.nanoseconds / 1000));
  const auto rest = static_cast<unsigned>(time.nanoseconds % 1000);
  text.push_back('.');
  for (const unsigned digit : {rest / 100, rest / 10 % 10, rest % 10})
    text.push_back(static_cast<char>('0' + digit));
}
// Names a call, the same on all members.
void add(std::string& text, const wire::OpKey& key) {
  add(text, key.admission);
  add(text, ".");
  if (key.tagged) {
    add(text, key.tag);
  } else {
    add(text, "-");
  }
  add(text, ".");
  add(text, key.sequence);
}
// Appends all parts, without a string for each.
template <class... Parts>
void put_on(std::string& text, const Parts&... parts) {
  (add(text, parts), ...);
}

// The inside of a JSON string. Reasons come from other peers and may have any bytes.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    const auto byte = static_cast<unsigned char>(c);
    out.push_back(byte < ' ' || byte > '~' ? '?' : c);
  }
  return out;
}

// As the status of a run has it.
std::string hex_of(std::uint64_t run) {
  std::array<char, 17> digits{};
  (void)std::snprintf(digits.data(), digits.size(), "%016llx",
                      static_cast<unsigned long long>(run));
  return digits.data();
}

// Names the host whose steady clock the trace has. Where that is not known, the trace counts as
// one of a host of its own.
std::string clock_of(const PeerId& peer) {
  const std::string boot = os::boot_id();
  return boot.empty() ? peer.hex() : escaped(boot);
}

}  // namespace

Result<std::unique_ptr<TraceWriter>> TraceWriter::open(const std::string& folder,
                                                       std::uint64_t max_bytes, const PeerId& peer,
                                                       std::uint32_t group,
                                                       const std::string& name) {
  const auto failed = [&](const std::string& what) {
    return Error{Code::invalid_argument,
                 "cannot write a trace to " + what + " (PCCL_TRACE): " + std::strerror(errno)};
  };
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) return failed(folder);
  const std::string path = folder + "/" + peer.hex() + ".json";
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return failed(path);
  std::unique_ptr<TraceWriter> made(new TraceWriter(file, max_bytes, peer, group, name));
  made->thread_ = io::start_thread([writer = made.get()] { writer->run(); });
  return made;
}

TraceWriter::TraceWriter(int file, std::uint64_t max_bytes, const PeerId& peer, std::uint32_t group,
                         const std::string& name)
    : file_(file), max_bytes_(max_bytes), pid_(peer.brief()) {
  const auto wall = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  put_on(text_, "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":\"", pid_,
         "\",\"args\":{\"name\":\"", escaped(name),
         "\"}},\n{\"name\":\"pccl\",\"ph\":\"M\",\"pid\":\"", pid_, "\",\"args\":{\"peer\":\"",
         peer.hex(), "\",\"group\":", std::uint64_t{group}, ",\"who\":\"", escaped(name),
         "\",\"boot\":\"", clock_of(peer), "\",\"wall_us\":", Microseconds{wall.count()},
         ",\"clock_us\":", Microseconds{nanoseconds(clock_now())}, "}}");
  flush();
}

TraceWriter::~TraceWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  text_ += "\n]\n";
  flush();
  ::close(file_);
}

void TraceWriter::add(std::vector<peer::TraceEvent> events) {
  const std::lock_guard lock(mutex_);
  if (queue_.size() + events.size() > kMaxQueued) {
    dropped_ += events.size();
    return;
  }
  queue_.insert(queue_.end(), std::make_move_iterator(events.begin()),
                std::make_move_iterator(events.end()));
}

void TraceWriter::run() {
  for (bool stop = false; !stop;) {
    std::vector<peer::TraceEvent> events;
    std::uint64_t dropped = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kFlushEvery, [&] { return stop_; });
      stop = stop_;
      events.swap(queue_);
      dropped = std::exchange(dropped_, 0);
    }
    write(events, dropped);
  }
}

void TraceWriter::write(const std::vector<peer::TraceEvent>& events, std::uint64_t dropped) {
  for (const peer::TraceEvent& event : events) {
    if (full_) return;
    std::visit([&](const auto& one) { put(one); }, event);
    if (text_.size() >= kFlushBytes) flush();
    if (written_ + text_.size() < max_bytes_) continue;
    full_ = true;
    moment(clock_now(), "the trace ends here", "it has its full size (PCCL_TRACE_MB)");
  }
  if (dropped > 0 && !full_)
    moment(clock_now(), "left out", std::to_string(dropped) + " events: the disk is too slow");
  flush();
}

void TraceWriter::flush() {
  std::string_view rest = text_;
  while (!rest.empty()) {
    const ssize_t sent = ::write(file_, rest.data(), rest.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
  if (rest.empty()) {
    written_ += text_.size();
  } else {  // such as a full disk: the file ends with the last text that came in whole
    full_ = true;
    if (::ftruncate(file_, static_cast<off_t>(written_)) == 0)
      (void)::lseek(file_, static_cast<off_t>(written_), SEEK_SET);
  }
  text_.clear();
}

// -- events

void TraceWriter::begin_span(std::string_view name, int lane, Instant begin, Instant end) {
  put_on(text_, ",\n{\"name\":\"", name, "\",\"ph\":\"X\",\"pid\":\"", pid_,
         "\",\"tid\":", static_cast<std::uint64_t>(lane),
         ",\"ts\":", Microseconds{nanoseconds(begin)}, ",\"dur\":", between(begin, end),
         ",\"args\":{");
}

void TraceWriter::name_lane(int lane, const std::string& name) {
  put_on(text_, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":\"", pid_,
         "\",\"tid\":", static_cast<std::uint64_t>(lane), ",\"args\":{\"name\":\"", escaped(name),
         "\"}}");
}

// Calls that run at once have lanes of their own: spans of one lane must nest.
int TraceWriter::lane_of(Instant begin, Instant end) {
  std::size_t lane = 0;
  while (lane < call_lanes_.size() && call_lanes_[lane] > begin) ++lane;
  if (lane == call_lanes_.size()) {
    if (lane < kMaxCallLanes) {
      call_lanes_.emplace_back();
      name_lane(static_cast<int>(lane), "calls " + std::to_string(lane));
    } else {
      --lane;
    }
  }
  call_lanes_[lane] = end;
  return static_cast<int>(lane);
}

int TraceWriter::lane_of(const PeerId& peer, bool sent) {
  const auto [it, made] =
      link_lanes_.try_emplace({peer, sent}, kFirstLinkLane + static_cast<int>(link_lanes_.size()));
  if (made) {
    const auto named = names_.find(peer);
    const std::string name = named == names_.end() ? peer.brief() : named->second;
    name_lane(it->second, (sent ? "to " : "from ") + name);
  }
  return it->second;
}

void TraceWriter::put(const peer::TracedCall& call) {
  const peer::Timing::Marks& marks = call.marks;
  const int lane = lane_of(marks.begun, marks.ended);
  // Times that did not come are those of what came after them.
  const Instant finished = marks.finished == Instant{} ? marks.ended : marks.finished;
  const Instant met = marks.met == Instant{} ? finished : marks.met;
  begin_span(wire::describe(call.key), lane, marks.begun, marks.ended);
  put_on(text_, "\"key\":\"", call.key, "\",\"bytes\":", call.bytes,
         ",\"waiting_us\":", between(marks.attempt, met), ",\"moving_us\":", between(met, finished),
         ",\"commit_us\":", between(finished, marks.ended));
  if (call.attempts > 1) put_on(text_, ",\"attempts\":", std::uint64_t{call.attempts});
  if (call.code != Code::ok) put_on(text_, ",\"failed\":", static_cast<std::uint64_t>(call.code));
  put_on(text_, "}}");
  const auto inner = [&](const char* name, Instant begin, Instant end) {
    if (end - begin < kShortest) return;
    begin_span(name, lane, begin, end);
    put_on(text_, "}}");
  };
  inner("lost attempts", marks.begun, marks.attempt);
  inner("waiting", marks.attempt, met);
  inner(call.in_memory ? "staging and reducing" : "sending and reducing", met, finished);
  inner("commit", finished, marks.ended);
}

void TraceWriter::put(const peer::TracedFlow& flow) {
  begin_span(flow.sent ? "sending" : "receiving", lane_of(flow.peer, flow.sent), flow.first,
             flow.last);
  put_on(text_, "\"key\":\"", flow.key, "\",\"peer\":\"", flow.peer.hex(),
         "\",\"bytes\":", flow.bytes, "}}");
}

void TraceWriter::put(const peer::TracedEpoch& epoch) {
  const wire::EpochRecord& record = *epoch.record;
  if (epoch.run != run_) {
    run_ = epoch.run;
    put_on(text_, ",\n{\"name\":\"pccl run\",\"ph\":\"M\",\"pid\":\"", pid_,
           "\",\"args\":{\"run\":\"", hex_of(run_), "\"}}");
  }
  for (const wire::Member& member : record.members)
    names_[member.id] = wire::shown_name(record.members, member.id);
  moment(epoch.at, "epoch " + std::to_string(record.epoch),
         plural(record.members.size(), "member"));
  for (const wire::Departure& gone : record.departures)
    moment(epoch.at, "lost " + gone.name, gone.reason);
}

void TraceWriter::moment(Instant at, std::string_view name, std::string_view text) {
  put_on(text_, ",\n{\"name\":\"", escaped(name), "\",\"ph\":\"i\",\"s\":\"p\",\"pid\":\"", pid_,
         "\",\"tid\":0,\"ts\":", Microseconds{nanoseconds(at)}, ",\"args\":{\"text\":\"",
         escaped(text), "\"}}");
}

}  // namespace pccl::node

#include "pccl/node/trace_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
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

// Microseconds with three decimals.
std::string microseconds(std::int64_t nanoseconds) {
  std::string text = std::to_string(nanoseconds / 1000) + ".";
  const auto rest = static_cast<unsigned>(nanoseconds % 1000);
  for (const unsigned digit : {rest / 100, rest / 10 % 10, rest % 10})
    text.push_back(static_cast<char>('0' + digit));
  return text;
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

// Names the host whose steady clock the trace has. Where that is not known, the trace counts as
// one of a host of its own.
std::string clock_of(const PeerId& peer) {
  const std::string boot = os::boot_id();
  return boot.empty() ? peer.hex() : escaped(boot);
}

std::string name_of(const wire::OpKey& key) {
  const std::string text = "collective #" + std::to_string(key.sequence);
  return key.tagged ? text + " of tag " + std::to_string(key.tag) : text;
}

// Names a call, the same on all members.
std::string key_of(const wire::OpKey& key) {
  return "\"key\":\"" + std::to_string(key.admission) + "." +
         (key.tagged ? std::to_string(key.tag) : std::string("-")) + "." +
         std::to_string(key.sequence) + "\"";
}

}  // namespace

Result<std::unique_ptr<TraceWriter>> TraceWriter::open(const std::string& folder,
                                                       std::uint64_t max_bytes, const PeerId& peer,
                                                       const std::string& name) {
  const auto failed = [&](const std::string& what) {
    return Error{Code::invalid_argument,
                 "cannot write a trace to " + what + " (PCCL_TRACE): " + std::strerror(errno),
                 {},
                 {}};
  };
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) return failed(folder);
  const std::string path = folder + "/" + peer.hex() + ".json";
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return failed(path);
  std::unique_ptr<TraceWriter> made(new TraceWriter(file, max_bytes, peer, name));
  made->thread_ = io::start_thread([writer = made.get()] { writer->run(); });
  return made;
}

TraceWriter::TraceWriter(int file, std::uint64_t max_bytes, const PeerId& peer,
                         const std::string& name)
    : file_(file), max_bytes_(max_bytes), peer_(peer) {
  const auto wall = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  const std::string id = peer_.hex();
  text_ = "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":\"" + peer_.brief() +
          "\",\"args\":{\"name\":\"" + escaped(name) + "\"}},\n" +
          "{\"name\":\"pccl\",\"ph\":\"M\",\"pid\":\"" + peer_.brief() +
          "\",\"args\":{\"peer\":\"" + id + "\",\"who\":\"" + escaped(name) + "\",\"boot\":\"" +
          clock_of(peer) + "\",\"wall_us\":" + microseconds(wall.count()) +
          ",\"clock_us\":" + microseconds(nanoseconds(clock_now())) + "}}";
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
    if (sent < 0) {
      full_ = true;  // such as a full disk
      break;
    }
    written_ += static_cast<std::uint64_t>(sent);
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
  text_.clear();
}

// -- events

void TraceWriter::span(std::string_view name, int lane, Instant begin, Instant end,
                       const std::string& arguments) {
  text_.append(",\n{\"name\":\"").append(name).append("\",\"ph\":\"X\",\"pid\":\"");
  text_.append(peer_.brief()).append("\",\"tid\":").append(std::to_string(lane));
  text_.append(",\"ts\":").append(microseconds(nanoseconds(begin)));
  text_.append(",\"dur\":").append(microseconds(nanoseconds(end) - nanoseconds(begin)));
  text_.append(",\"args\":{").append(arguments).append("}}");
}

void TraceWriter::name_lane(int lane, const std::string& name) {
  text_ += ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":\"" + peer_.brief() +
           "\",\"tid\":" + std::to_string(lane) + ",\"args\":{\"name\":\"" + escaped(name) + "\"}}";
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
  const auto part = [](Instant begin, Instant end) {
    return microseconds(std::max<std::int64_t>(nanoseconds(end) - nanoseconds(begin), 0));
  };
  std::string arguments = key_of(call.key);
  arguments += ",\"bytes\":" + std::to_string(call.bytes);
  arguments += ",\"waiting_us\":" + part(marks.attempt, met);
  arguments += ",\"moving_us\":" + part(met, finished);
  arguments += ",\"commit_us\":" + part(finished, marks.ended);
  if (call.attempts > 1) arguments += ",\"attempts\":" + std::to_string(call.attempts);
  if (call.code != Code::ok)
    arguments += ",\"failed\":" + std::to_string(static_cast<int>(call.code));
  span(name_of(call.key), lane, marks.begun, marks.ended, arguments);
  const auto inner = [&](const char* name, Instant begin, Instant end) {
    if (end - begin >= kShortest) span(name, lane, begin, end, "");
  };
  inner("lost attempts", marks.begun, marks.attempt);
  inner("waiting", marks.attempt, met);
  inner(call.in_memory ? "staging and reducing" : "sending and reducing", met, finished);
  inner("commit", finished, marks.ended);
}

void TraceWriter::put(const peer::TracedFlow& flow) {
  span(flow.sent ? "sending" : "receiving", lane_of(flow.peer, flow.sent), flow.first, flow.last,
       key_of(flow.key) + ",\"peer\":\"" + flow.peer.hex() +
           "\",\"bytes\":" + std::to_string(flow.bytes));
}

void TraceWriter::put(const peer::TracedEpoch& epoch) {
  const wire::EpochRecord& record = *epoch.record;
  for (const wire::Member& member : record.members)
    names_[member.id] = wire::shown_name(record.members, member.id);
  moment(epoch.at, "epoch " + std::to_string(record.epoch),
         plural(record.members.size(), "member"));
  for (const wire::Departure& gone : record.departures)
    moment(epoch.at, "lost " + gone.name, gone.reason);
}

void TraceWriter::moment(Instant at, std::string_view name, std::string_view text) {
  text_.append(",\n{\"name\":\"").append(escaped(name));
  text_.append("\",\"ph\":\"i\",\"s\":\"p\",\"pid\":\"").append(peer_.brief());
  text_.append("\",\"tid\":0,\"ts\":").append(microseconds(nanoseconds(at)));
  text_.append(",\"args\":{\"text\":\"").append(escaped(text)).append("\"}}");
}

}  // namespace pccl::node

#include "pccl/server/relay.h"

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <string>

#include "pccl/base/clock.h"
#include "pccl/base/log.h"
#include "pccl/wire/messages.h"

namespace pccl::server {
namespace {

constexpr std::size_t kTurnBytes = 1 << 20;  // of one direction, before others have their turn
constexpr Duration kRefill = std::chrono::milliseconds(20);
constexpr double kBurst = 0.1;  // seconds' worth that may go at once

std::string brief(const std::pair<PeerId, PeerId>& pair) {
  return pair.first.brief() + " and " + pair.second.brief();
}

}  // namespace

Relays::Relays(asio::io_context& context, std::uint64_t rate, std::size_t most_open)
    : context_(context),
      rate_(rate),
      most_open_(std::min(most_open, kMostOpen)),
      scratch_(kHeldBytes),
      refill_(context) {}

void Relays::stop() {
  refill_.cancel();
  tokens_.clear();
  meetings_.clear();
  open_.clear();
}

void Relays::expect(const PeerId& one, const PeerId& other, const PeerId& token_of_one,
                    const PeerId& token_of_other, Instant now) {
  if (count_of(ordered(one, other)) >= kMostOfPair) return;
  if (meetings_.size() >= kMostExpected) forget(meetings_.begin()->first);
  const std::uint64_t id = next_++;
  Meeting& meeting = meetings_[id];
  meeting.pair = ordered(one, other);
  meeting.tokens = {token_of_one, token_of_other};
  meeting.until = now + kTokenTime;
  for (const PeerId& token : meeting.tokens) tokens_[token] = id;
}

void Relays::forget(std::uint64_t id) {
  for (const PeerId& token : meetings_.at(id).tokens) tokens_.erase(token);
  meetings_.erase(id);
}

std::size_t Relays::count_of(const Pair& pair) const {
  const auto same = [&](const auto& item) { return item.second.pair == pair; };
  return static_cast<std::size_t>(std::count_if(meetings_.begin(), meetings_.end(), same) +
                                  std::count_if(open_.begin(), open_.end(), same));
}

std::size_t Relays::taken() const {
  return open_.size() + static_cast<std::size_t>(
                            std::count_if(meetings_.begin(), meetings_.end(), [](const auto& item) {
                              const auto& sockets = item.second.sockets;
                              return sockets[0] != nullptr || sockets[1] != nullptr;
                            }));
}

bool Relays::enter(const PeerId& token, std::unique_ptr<io::Socket> socket, Instant now) {
  const auto it = tokens_.find(token);
  if (it == tokens_.end()) return false;
  const std::uint64_t id = it->second;
  tokens_.erase(it);
  Meeting& meeting = meetings_.at(id);
  const bool second = meeting.sockets[0] != nullptr || meeting.sockets[1] != nullptr;
  if (now >= meeting.until || (!second && taken() >= most_open_)) {
    forget(id);
    return false;
  }
  const std::size_t side = token == meeting.tokens[0] ? 0 : 1;
  meeting.sockets[side] = std::move(socket);
  if (meeting.sockets[1 - side] == nullptr) return true;
  Meeting complete = std::move(meeting);
  forget(id);
  begin(std::move(complete), now);
  return true;
}

void Relays::begin(Meeting meeting, Instant now) {
  const wire::Bytes word = wire::encode({}, wire::Relayed{});
  const iovec from{const_cast<std::uint8_t*>(word.data()), word.size()};
  for (const auto& socket : meeting.sockets) {
    // It has room for the first bytes that are written to it; if it has ended, reading says so.
    (void)socket->write({&from, 1});
    socket->hold_little();
  }
  const auto [tally, fresh] = tallies_.try_emplace(meeting.pair);
  if (fresh) {
    tally->second.since = now;
    log(LogLevel::warn, "master",
        "peers " + brief(meeting.pair) +
            " cannot connect: what goes between them goes through this master (PCCL_RELAY)");
  }
  ++tally->second.open;
  const std::uint64_t id = next_++;
  Open& open = open_[id];
  open.pair = meeting.pair;
  open.sockets = std::move(meeting.sockets);
  for (const std::size_t side : {0U, 1U}) {
    asio::post(context_, [this, id, side] { turn(id, side); });
  }
}

// Writes what is held. False: that end takes no more now, and it is waited for.
bool Relays::push(Open& open, std::size_t from) {
  Direction& way = open.directions[from];
  while (way.held_at < way.held.size()) {
    const iovec rest{way.held.data() + way.held_at, way.held.size() - way.held_at};
    const ssize_t put = open.sockets[1 - from]->write({&rest, 1});
    if (put == -EAGAIN) return false;
    if (put < 0) {
      way.ended = true;
      break;
    }
    way.held_at += static_cast<std::size_t>(put);
    way.stuck_since.reset();
  }
  way.held_at = 0;
  std::vector<std::uint8_t>().swap(way.held);
  return true;
}

void Relays::turn(std::uint64_t id, std::size_t from) {
  try {
    pump(id, from);
  } catch (const std::exception& error) {
    log(LogLevel::warn, "master", std::string("a relayed connection was closed: ") + error.what());
    close(id);
  }
}

// Moves bytes from that end to the other, as many as can be.
void Relays::pump(std::uint64_t id, std::size_t from) {
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  Open& open = it->second;
  Direction& way = open.directions[from];
  if (way.waits) return;
  const auto again = [this, id, from](const asio::error_code& error) {
    const auto found = open_.find(id);
    if (error || found == open_.end()) return;
    found->second.directions[from].waits = false;
    turn(id, from);
  };
  for (std::size_t moved = 0;;) {
    if (!push(open, from)) {
      way.waits = true;
      if (!way.stuck_since) way.stuck_since = clock_now();
      return open.sockets[1 - from]->wait_writable(again);
    }
    if (way.ended) return close(id);
    if (moved >= kTurnBytes) {
      way.waits = true;
      return asio::post(context_, [again] { again({}); });
    }
    const std::size_t room = allowed(scratch_.size());
    if (room == 0) return wait_for_allowance(id, from);
    const iovec into{scratch_.data(), room};
    const ssize_t got = open.sockets[from]->read({&into, 1});
    if (got == -EAGAIN) {
      way.waits = true;
      return open.sockets[from]->wait_readable(again);
    }
    if (got <= 0) {
      way.ended = true;
      continue;
    }
    const auto bytes = static_cast<std::size_t>(got);
    moved += bytes;
    tallies_.at(open.pair).bytes += bytes;
    allowance_ -= static_cast<double>(bytes);
    if (share_) *share_ -= static_cast<double>(bytes);
    const iovec out{scratch_.data(), bytes};
    const ssize_t put = std::max<ssize_t>(0, open.sockets[1 - from]->write({&out, 1}));
    way.held.assign(scratch_.begin() + put, scratch_.begin() + got);
  }
}

void Relays::close(std::uint64_t id) {
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  const auto tally = tallies_.find(it->second.pair);
  if (--tally->second.open == 0) {
    const double seconds = std::chrono::duration<double>(clock_now() - tally->second.since).count();
    log(LogLevel::info, "master",
        "relayed " + std::to_string(tally->second.bytes) + " bytes between peers " +
            brief(tally->first) + " in " + std::to_string(seconds) + " s");
    tallies_.erase(tally);
  }
  open_.erase(it);
}

void Relays::end(const PeerId& one, const PeerId& other, Instant) {
  const Pair pair = ordered(one, other);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, meeting] : meetings_)
    if (meeting.pair == pair) ids.push_back(id);
  for (const std::uint64_t id : ids) forget(id);
  ids.clear();
  for (const auto& [id, open] : open_)
    if (open.pair == pair) ids.push_back(id);
  for (const std::uint64_t id : ids) close(id);
}

void Relays::on_time(Instant now) {
  while (!meetings_.empty() && now >= meetings_.begin()->second.until)
    forget(meetings_.begin()->first);
  std::vector<std::uint64_t> stuck;
  for (const auto& [id, open] : open_) {
    if (std::any_of(open.directions.begin(), open.directions.end(), [&](const Direction& way) {
          return way.stuck_since && now - *way.stuck_since >= kStuck;
        }))
      stuck.push_back(id);
  }
  for (const std::uint64_t id : stuck) close(id);
}

// Bytes that may be read now. Who waits already comes first.
std::size_t Relays::allowed(std::size_t wanted) {
  if (rate_ == 0) return wanted;
  const Instant now = clock_now();
  const double passed = std::chrono::duration<double>(now - filled_).count();
  const auto rate = static_cast<double>(rate_);
  const double most = std::max(1.0, rate * kBurst);
  allowance_ = filled_ == Instant{} ? most : std::min(most, allowance_ + passed * rate);
  filled_ = now;
  const double mine = share_ ? std::min(*share_, allowance_) : starved_.empty() ? allowance_ : 0;
  return mine < 1 ? 0 : std::min(wanted, static_cast<std::size_t>(mine));
}

void Relays::wait_for_allowance(std::uint64_t id, std::size_t from) {
  open_.at(id).directions[from].waits = true;
  starved_.emplace_back(id, from);
  if (starved_.size() > 1) return;
  refill_.expires_after(kRefill);
  refill_.async_wait([this](const asio::error_code& error) {
    if (error) return;
    // Equal parts, and at least a byte for the one that has waited longest.
    const auto waiting = std::exchange(starved_, {});
    (void)allowed(0);
    const double part = std::max(1.0, allowance_ / static_cast<double>(waiting.size()));
    for (const auto& [next, side] : waiting) {
      const auto found = open_.find(next);
      if (found == open_.end()) continue;
      found->second.directions[side].waits = false;
      share_ = part;
      turn(next, side);
    }
    share_.reset();
  });
}

}  // namespace pccl::server

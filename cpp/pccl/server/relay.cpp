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

constexpr std::size_t kTurnBytes = 1 << 20;  // moved in one direction before others get a turn
constexpr Duration kRefill = std::chrono::milliseconds(20);
constexpr double kBurst = 0.1;  // burst of the rate limit, in seconds

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
  expected_.clear();
  open_.clear();
}

void Relays::expect(const PeerId& one, const PeerId& other, const RelayToken& token_of_one,
                    const RelayToken& token_of_other, Instant now, const std::string& names) {
  if (count_of(ordered(one, other)) >= kMostOfPair) return;
  if (expected_.size() >= kMostExpected) forget(expected_.begin()->first);
  const std::uint64_t id = next_++;
  Expected& ends = expected_[id];
  ends.pair = ordered(one, other);
  ends.tokens = {token_of_one, token_of_other};
  ends.until = now + kTokenTime;
  ends.names = names;
  for (const RelayToken& token : ends.tokens) tokens_[token] = id;
}

void Relays::forget(std::uint64_t id) {
  for (const RelayToken& token : expected_.at(id).tokens) tokens_.erase(token);
  expected_.erase(id);
}

std::size_t Relays::count_of(const Pair& pair) const {
  const auto same = [&](const auto& item) { return item.second.pair == pair; };
  return static_cast<std::size_t>(std::count_if(expected_.begin(), expected_.end(), same) +
                                  std::count_if(open_.begin(), open_.end(), same));
}

std::size_t Relays::taken() const {
  return open_.size() + static_cast<std::size_t>(
                            std::count_if(expected_.begin(), expected_.end(), [](const auto& item) {
                              const auto& sockets = item.second.sockets;
                              return sockets[0] != nullptr || sockets[1] != nullptr;
                            }));
}

bool Relays::enter(const RelayToken& token, std::unique_ptr<io::Socket> socket, Instant now) {
  const auto it = tokens_.find(token);
  if (it == tokens_.end()) return false;
  const std::uint64_t id = it->second;
  tokens_.erase(it);
  Expected& ends = expected_.at(id);
  const bool second = ends.sockets[0] != nullptr || ends.sockets[1] != nullptr;
  if (now >= ends.until || (!second && taken() >= most_open_)) {
    forget(id);
    return false;
  }
  const std::size_t side = token == ends.tokens[0] ? 0 : 1;
  ends.sockets[side] = std::move(socket);
  if (ends.sockets[1 - side] == nullptr) return true;
  Expected complete = std::move(ends);
  forget(id);
  begin(std::move(complete), now);
  return true;
}

void Relays::begin(Expected ends, Instant now) {
  const wire::Bytes relayed = wire::encode({}, wire::Relayed{});
  for (const auto& socket : ends.sockets) {
    // A new socket has room for these bytes. If its other end is gone, a later read fails.
    (void)socket->write(relayed);
    socket->hold_little();
  }
  const auto [tally, fresh] = tallies_.try_emplace(ends.pair);
  if (fresh) {
    tally->second.since = now;
    tally->second.names = ends.names;
    log(LogLevel::warn, "master",
        "peers " + tally->second.names +
            " cannot connect: this master relays between them (PCCL_RELAY)");
  }
  ++tally->second.open;
  const std::uint64_t id = next_++;
  Open& open = open_[id];
  open.pair = ends.pair;
  open.sockets = std::move(ends.sockets);
  for (const std::size_t side : {0U, 1U}) {
    asio::post(context_, [this, id, side] { turn(id, side); });
  }
}

void Relays::turn(std::uint64_t id, std::size_t from) {
  try {
    pump(id, from);
  } catch (const std::exception& error) {
    log(LogLevel::warn, "master", std::string("a relayed connection was closed: ") + error.what());
    close(id);
  }
}

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
    found->second.directions[from].held.resume();
    turn(id, from);
  };
  io::Socket& sender = *open.sockets[from];
  io::Socket& receiver = *open.sockets[1 - from];
  for (std::size_t moved = 0;;) {
    const std::size_t held = way.held.size();
    const int result = way.held.flush(receiver, again);
    if (way.held.size() < held) way.stuck_since.reset();
    if (result == -EAGAIN) {
      way.waits = true;
      if (!way.stuck_since) way.stuck_since = clock_now();
      return;
    }
    if (result < 0) way.ended = true;
    if (way.ended) return close(id);
    if (moved >= kTurnBytes) {
      way.waits = true;
      return asio::post(context_, [again] { again({}); });
    }
    const std::size_t room = allowed(scratch_.size());
    if (room == 0) return wait_for_allowance(id, from);
    const ssize_t got = sender.read(std::span(scratch_).first(room));
    if (got == -EAGAIN) {
      way.waits = true;
      return sender.wait_readable(again);
    }
    if (got <= 0) {
      way.ended = true;
      continue;
    }
    const auto bytes = std::span(scratch_).first(static_cast<std::size_t>(got));
    moved += bytes.size();
    tallies_.at(open.pair).bytes += bytes.size();
    allowance_ -= static_cast<double>(bytes.size());
    if (share_) *share_ -= static_cast<double>(bytes.size());
    const auto put = static_cast<std::size_t>(std::max<ssize_t>(0, receiver.write(bytes)));
    way.held.append(bytes.subspan(put));
  }
}

void Relays::close(std::uint64_t id) {
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  const auto tally = tallies_.find(it->second.pair);
  if (--tally->second.open == 0) {
    const double seconds = in_seconds(clock_now() - tally->second.since);
    log(LogLevel::info, "master",
        "relayed " + std::to_string(tally->second.bytes) + " bytes between peers " +
            tally->second.names + " in " + std::to_string(seconds) + " s");
    tallies_.erase(tally);
  }
  open_.erase(it);
}

void Relays::end(const PeerId& one, const PeerId& other) {
  const Pair pair = ordered(one, other);
  std::vector<std::uint64_t> ids;
  for (const auto& [id, ends] : expected_)
    if (ends.pair == pair) ids.push_back(id);
  for (const std::uint64_t id : ids) forget(id);
  ids.clear();
  for (const auto& [id, open] : open_)
    if (open.pair == pair) ids.push_back(id);
  for (const std::uint64_t id : ids) close(id);
}

void Relays::on_time(Instant now) {
  while (!expected_.empty() && now >= expected_.begin()->second.until)
    forget(expected_.begin()->first);
  std::vector<std::uint64_t> stuck;
  for (const auto& [id, open] : open_) {
    if (std::any_of(open.directions.begin(), open.directions.end(), [&](const Direction& way) {
          return way.stuck_since && now - *way.stuck_since >= kStuck;
        }))
      stuck.push_back(id);
  }
  for (const std::uint64_t id : stuck) close(id);
}

// Returns the number of bytes that may be read now. Directions that already wait come first.
std::size_t Relays::allowed(std::size_t wanted) {
  if (rate_ == 0) return wanted;
  const Instant now = clock_now();
  const double passed = in_seconds(now - filled_);
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
    // Each direction gets an equal share of at least one byte.
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

// The actions that the master wants done, in order, and the lines of its log.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/master/event_log.h"
#include "pccl/master/surroundings.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

struct Send {
  ConnectionId to = 0;
  wire::Bytes bytes;
};
// Close after flushing earlier messages.
struct Close {
  ConnectionId connection = 0;
};
// Connect to the address, close the connection, and report the result by on_tried. Not needed once
// the asking connection is gone.
struct TryAddress {
  ConnectionId for_whom = 0;
  wire::Address address;
};
// Two connections will send OpenRelay, one with each token. Relay between them. A token is valid
// once.
struct ExpectRelay {
  PeerId one;  // the peers at the ends
  PeerId other;
  RelayToken token_of_one;
  RelayToken token_of_other;
  std::string names;  // of the peers: "one and other"
};
// End all relaying between these two peers.
struct EndRelay {
  PeerId one;
  PeerId other;
};
using Action = std::variant<Send, Close, LogLine, TryAddress, ExpectRelay, EndRelay>;

// *one thread: the master's*
class Outbox {
 public:
  // Every event begins with its time.
  void at(Instant now) {
    now_ = now;
    if (began_ == Instant{}) began_ = now;
  }
  [[nodiscard]] Instant now() const { return now_; }
  [[nodiscard]] Instant began() const { return began_; }

  // Made in its place: GCC 12 takes the move of a temporary Action for one of uninitialised memory.
  template <class One>
  void add(One action) {
    actions_.emplace_back(std::in_place_type<One>, std::move(action));
  }
  [[nodiscard]] std::vector<Action> take() { return std::exchange(actions_, {}); }

  void log(LogLine line) {
    events_.add(line, now_);
    add(std::move(line));
  }
  void log(std::string text) { log(LogLine{false, {}, 0, std::move(text)}); }
  // A line that strangers can cause.
  void log_rarely(std::string text) {
    if (const auto limited = rare_.line(std::move(text), now_)) log(*limited);
  }
  [[nodiscard]] const EventLog& events() const { return events_; }

 private:
  Instant began_{};  // the time of the first event
  Instant now_{};    // the time of the present event
  std::vector<Action> actions_;
  EventLog events_;
  RareLines rare_;
};

}  // namespace pccl::master

// What a peer shares with others of its host: connections that pass memory on, its board, the page
// of each epoch, and the collective over them. Sans-I/O, like the engine it is a part of.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/log.h"
#include "pccl/memory/local_group.h"
#include "pccl/memory/offer.h"
#include "pccl/peer/session.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

struct LocalityOptions {
  memory::RegionMaker make_region;  // empty: nothing is shared
  // Of arrays that others may read where they are; empty: there are none.
  std::function<std::optional<memory::Place>(const void*, std::size_t)> find_array;
  std::function<void()> poll;  // brings what neighbours have sent; may call on_offered
  Duration patience = std::chrono::seconds(3);  // for a neighbour to answer
  memory::LocalOptions group;
};

// What the shell has to do.
struct LocalityActions {
  struct Offering {
    PeerId to;
    memory::Offer what;
    std::uint64_t number;
    memory::RegionPtr region;  // null: of no use any more
  };
  std::vector<std::pair<PeerId, PeerId>> connects;  // peer and its word
  std::vector<PeerId> drops;
  std::vector<Offering> offers;
  std::vector<PeerId> rings;
  [[nodiscard]] bool empty() const {
    return connects.empty() && drops.empty() && offers.empty() && rings.empty();
  }
};

// An operation is over here, and its arrays are not used any more. `told`: the master must hear
// that it is done.
struct LocalCommit {
  wire::OpKey key;
  collective::Traffic traffic;
  bool newcomers_wait = false;
  bool told = false;
};
// It goes on over the network, in this epoch, for all members.
struct LocalEscalation {
  wire::OpKey key;
};
struct LocalNotice {
  LogLevel level;
  std::string text;
};
// The neighbourhood: with whom this peer shares memory has changed.
using LocalityEvent = std::variant<LocalCommit, LocalEscalation, wire::Neighbourhood, LocalNotice>;

// *one thread: the engine's*
class Locality final : private memory::LocalHost {
 public:
  Locality(LocalityOptions options, const PeerId& self)
      : options_(std::move(options)), self_(self), group_(options_.group, *this) {}

  // Newcomers wait to be let in: the next commit in memory says so.
  void newcomers_wait(bool waiting) { newcomers_wait_ = waiting; }

  // Whom to share with: all these, if they are on this host. The newer of a pair connects.
  void choose(const std::vector<wire::Member>& peers, std::uint64_t joined, Instant now);
  void on_up(const PeerId& peer, Instant now);
  void on_down(const PeerId& peer, const std::string& reason, Instant now);
  void on_offered(const PeerId& peer, memory::Offer what, std::uint64_t number,
                  const memory::RegionPtr& region, Instant now);
  void on_time(Instant now);
  [[nodiscard]] std::optional<Instant> next_deadline() const;

  // The collective of the epoch before ends: false when a result is lost, and this peer must go.
  [[nodiscard]] bool close_group() { return group_.close(); }
  // REQUIRES: close_group().
  void begin_epoch(const Record& record);
  // The epoch's plan has that member on this host, and a way to it is there.
  [[nodiscard]] bool shares_with(const PeerId& peer) const;
  // Operations of this epoch go here first.
  [[nodiscard]] bool active() const { return active_; }
  [[nodiscard]] memory::LocalGroup& group() { return group_; }
  [[nodiscard]] const memory::LocalGroup& group() const { return group_; }
  [[nodiscard]] Pace step(Instant now) {
    now_ = now;
    return group_.step(now);
  }

  [[nodiscard]] std::vector<LocalityEvent> take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] LocalityActions take_actions() { return std::exchange(actions_, {}); }
  [[nodiscard]] bool has_actions() const { return !actions_.empty(); }

 private:
  struct Neighbour {
    PeerId word;  // zero: it came before the master named it
    bool connected = false;
    bool pending = false;   // we do not know yet
    bool dials = false;     // we connect, not it
    Instant since{};        // of the latest change
    Instant redial_at{};    // zero: no need to
    unsigned failures = 0;  // to share with it, since it last worked
    // What it has of us, in this connection.
    std::optional<std::uint64_t> given_board;
    std::uint64_t given_scratch = 0;
    std::set<std::uint64_t> given_arrays;
    std::map<std::uint64_t, memory::RegionPtr>
        arrays;  // by number, until it says that they are gone
    std::uint64_t given_page = 0;
    // What we have of it.
    memory::RegionPtr board;
    std::uint64_t board_number = 0;
    std::uint64_t board_needed = 0;  // older ones may be written by nobody any more
    std::map<std::uint64_t, memory::RegionPtr> pages;    // by epoch, the newest few
    std::map<std::uint64_t, memory::RegionPtr> scratch;  // by number, from the one used last
  };

  // memory::LocalHost
  void local_committed(const wire::OpKey& key, const collective::Traffic& traffic,
                       bool newcomers_wait, bool told) override {
    events_.emplace_back(LocalCommit{key, traffic, newcomers_wait, told});
  }
  void local_escalated(const wire::OpKey& key) override {
    events_.emplace_back(LocalEscalation{key});
  }
  void ring(std::uint32_t rank) override { actions_.rings.push_back(ranks_[rank]); }
  [[nodiscard]] bool newcomers_wait() const override { return newcomers_wait_; }
  [[nodiscard]] Result<std::pair<memory::RegionPtr, std::uint64_t>> take_scratch(
      std::size_t bytes) override;
  [[nodiscard]] memory::RegionPtr scratch_of(std::uint32_t rank, std::uint64_t number) override;
  [[nodiscard]] std::optional<memory::Place> place_of(const void* data, std::size_t bytes) override;
  [[nodiscard]] bool may_share(const std::vector<memory::ChunkPtr>& chunks) override;
  bool share(const memory::ChunkPtr& chunk) override;
  [[nodiscard]] memory::RegionPtr array_of(std::uint32_t rank, std::uint64_t number) override;

  bool make_board();
  [[nodiscard]] bool is_member(const PeerId& peer) const;
  void give(const PeerId& peer, Neighbour& neighbour);
  void give_members();
  void forget_stale(std::uint64_t epoch);
  void forget_arrays();
  void claim();
  void try_open();
  void fail(const std::string& what);

  LocalityOptions options_;
  PeerId self_;
  memory::LocalGroup group_;
  LocalityActions actions_;
  std::vector<LocalityEvent> events_;
  bool newcomers_wait_ = false;
  std::map<PeerId, Neighbour> neighbours_;
  wire::Neighbourhood claimed_;
  bool failed_ = false;  // there was no memory: over TCP from now on
  memory::RegionPtr board_;
  std::uint64_t board_number_ = 0;
  memory::RegionPtr scratch_;
  std::uint64_t scratch_number_ = 0;
  std::size_t scratch_wanted_ = 0;  // the most, since
  // Arrays that others were given, and since which of our `gifts_` all of them have it.
  struct Shared {
    std::weak_ptr<const memory::Chunk> chunk;
    std::uint64_t given = 0;
  };
  std::map<std::uint64_t, Shared> shared_;
  std::uint64_t gifts_ = 1;  // grows when there is somebody who may have to be given something
  Instant scratch_since_{};  // it was made, or much of it was used
  Instant now_{};            // of the latest step
  memory::RegionPtr page_;
  bool active_ = false;
  std::uint64_t epoch_ = 0;
  std::uint32_t rank_ = 0;
  std::vector<PeerId> ranks_;
  std::vector<std::uint32_t> hosts_;  // by rank; empty: the plan knows none
};

}  // namespace pccl::peer

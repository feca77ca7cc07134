// Memory shared with the peers of this host: the connections that pass it on, this peer's board,
// the page of each epoch, and the collective over them. Pure.
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
#include "pccl/state/transfer.h"
#include "pccl/wire/messages.h"

namespace pccl::peer {

struct LocalityOptions {
  memory::RegionMaker make_region;  // empty: nothing is shared
  // Finds an array in memory that neighbours may map. Empty: there are no such arrays.
  std::function<std::optional<memory::Place>(const void*, std::size_t)> find_array;
  std::function<void()> poll;  // reads what neighbours have sent; may call on_offered
  Duration patience = std::chrono::seconds(3);  // for a neighbour to answer
  memory::LocalOptions group;
};

// Connect to a peer of this host.
struct NeighbourDial {
  PeerId peer;
  MemoryKey memory_key;  // of that peer
};

// Actions for the shell.
struct LocalityActions {
  struct Offering {
    PeerId to;
    memory::Offer what;
    std::uint64_t number;
    memory::RegionPtr region;  // null: withdraws the offer
  };
  std::vector<NeighbourDial> dials;
  std::vector<PeerId> drops;
  std::vector<Offering> offers;
  std::vector<PeerId> rings;
  [[nodiscard]] bool empty() const {
    return dials.empty() && drops.empty() && offers.empty() && rings.empty();
  }
};

using memory::LocalCommit;
struct LocalEscalation {
  wire::OpKey key;
};
struct LocalNotice {
  LogLevel level;
  std::string text;
};
// Neighbourhood: the peers with which this one shares memory have changed.
using LocalityEvent = std::variant<LocalCommit, LocalEscalation, wire::Neighbourhood, LocalNotice>;

// *one thread: the engine's*
class Locality final : public state::NeighbourMemory, private memory::LocalHost {
 public:
  Locality(LocalityOptions options, const PeerId& self)
      : options_(std::move(options)), self_(self), group_(options_.group, *this) {}

  // Whether the next admission point needs its round, since a newcomer could enter. The next commit
  // in memory reports it.
  void admission_due(bool due) { admission_due_ = due; }

  // Shares memory with those of `peers` that are on this host. The newer peer of a pair connects.
  void choose(const std::vector<wire::Member>& peers, std::uint64_t joined, Instant now);
  void on_up(const PeerId& peer, Instant now);
  void on_down(const PeerId& peer, const std::string& reason, Instant now);
  void on_offered(const PeerId& peer, memory::Offer what, std::uint64_t number,
                  const memory::RegionPtr& region);
  void on_unmapped(const PeerId& peer, memory::Offer what, std::uint64_t number,
                   const std::string& reason);
  void on_time(Instant now);
  [[nodiscard]] std::optional<Instant> next_deadline() const;

  // Ends the previous epoch's collective. False: a result is lost, and this peer must leave.
  [[nodiscard]] bool close_group() { return group_.close(); }
  // REQUIRES: close_group() was called.
  void begin_epoch(std::uint64_t run, const Record& record);
  // The epoch's plan has that member on this host, and it shares memory with this peer now.
  [[nodiscard]] bool shares_with(const PeerId& peer) const;
  // state::NeighbourMemory, for members.
  [[nodiscard]] std::optional<state::SharedBytes> share(const PeerId& peer,
                                                        const std::uint8_t* data,
                                                        std::uint64_t bytes) override;
  [[nodiscard]] std::optional<std::span<const std::uint8_t>> memory_of(
      const PeerId& peer, std::uint64_t number) const override;
  void stop_sharing() override { transferring_ = false; }
  // The plan has all members on this host: operations start in memory.
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
    MemoryKey memory_key;  // zero: it connected before the master named it
    bool connected = false;
    bool pending = false;   // whether it shares memory is not known yet
    bool dials = false;     // we connect, not the neighbour
    Instant since{};        // of the latest change
    Instant redial_at{};    // zero: no redial is due
    unsigned failures = 0;  // connections lost or failed, in a row
    // Memory of ours that it was given on this connection.
    std::optional<std::uint64_t> given_board;
    std::uint64_t given_scratch = 0;
    std::set<std::uint64_t> given_arrays;
    std::uint64_t given_page = 0;  // epoch of the page that it was given
    // Memory of the neighbour that we have.
    memory::RegionPtr board;
    std::uint64_t board_number = 0;
    std::uint64_t board_needed = 0;                      // boards with lower numbers are out of use
    std::map<std::uint64_t, memory::RegionPtr> arrays;   // by number, until it withdraws them
    std::map<std::uint64_t, memory::RegionPtr> pages;    // by epoch, the newest few
    std::map<std::uint64_t, memory::RegionPtr> scratch;  // by number, from the last one used
    // Memory of the neighbour that cannot be mapped here.
    std::set<std::uint64_t> unmapped_arrays;  // by number, until it withdraws them
    bool unmapped_scratch = false;            // the newest
  };

  // memory::LocalHost
  void local_committed(const LocalCommit& commit) override { events_.emplace_back(commit); }
  void local_escalated(const wire::OpKey& key) override {
    events_.emplace_back(LocalEscalation{key});
  }
  void ring(std::uint32_t rank) override { actions_.rings.push_back(ranks_[rank]); }
  [[nodiscard]] bool admission_due() const override { return admission_due_; }
  [[nodiscard]] Result<std::pair<memory::RegionPtr, std::uint64_t>> take_scratch(
      std::size_t bytes) override;
  [[nodiscard]] memory::RegionPtr scratch_of(std::uint32_t rank, std::uint64_t number) override;
  [[nodiscard]] std::optional<memory::Place> place_of(const void* data, std::size_t bytes) override;
  [[nodiscard]] bool may_share(const std::vector<memory::ChunkPtr>& chunks) override;
  bool share(const memory::ChunkPtr& chunk) override;
  bool give_array(const PeerId& peer, Neighbour& neighbour, const memory::Chunk& chunk);
  [[nodiscard]] memory::RegionPtr array_of(std::uint32_t rank, std::uint64_t number) override;
  [[nodiscard]] Unmapped unmapped() const override;

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
  bool admission_due_ = false;
  std::map<PeerId, Neighbour> neighbours_;
  wire::Neighbourhood claimed_;
  bool failed_ = false;           // memory was refused: over TCP from now on
  bool warned_unmapped_ = false;  // that memory of others cannot be mapped
  memory::RegionPtr board_;
  std::uint64_t board_number_ = 0;
  memory::RegionPtr scratch_;
  std::uint64_t scratch_number_ = 0;
  std::size_t scratch_wanted_ = 0;  // the largest request since scratch_since_
  // Arrays that neighbours were given. `given`: the value of gifts_ when all of them had it; 0:
  // only for a transfer of state.
  struct Shared {
    std::weak_ptr<const memory::Chunk> chunk;
    std::uint64_t given = 0;
  };
  std::map<std::uint64_t, Shared> shared_;
  bool transferring_ = false;
  // Grows when a neighbour may lack arrays: it connected, or an epoch began.
  std::uint64_t gifts_ = 1;
  Instant scratch_since_{};  // when it was made, or last used to a large part
  Instant now_{};            // of the latest step
  memory::RegionPtr page_;
  bool active_ = false;
  std::uint64_t run_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint32_t rank_ = 0;
  std::vector<PeerId> ranks_;
  std::vector<std::uint32_t> hosts_;  // by rank; empty: the plan has none
};

}  // namespace pccl::peer

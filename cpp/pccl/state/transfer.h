// Transfers a shared state. Holders send chunks from their own memory, or tell receivers on their
// host where to read them. Receivers request the chunks that differ from several holders at once,
// verify every chunk, and keep it apart until the sync is over. Sans-I/O: stripes ask where
// received bytes go and what to send next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/parallel.h"
#include "pccl/link/carrier.h"
#include "pccl/link/stripe.h"
#include "pccl/state/fetch_plan.h"
#include "pccl/state/manifest.h"

namespace pccl::state {

// Names a sync on the links.
struct SyncId {
  std::uint64_t admission = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const SyncId&) const = default;
};

// A receiver's request for the manifest, or for chunks by number.
struct Fetch {
  bool manifest = false;
  // It cannot read these chunks in the holder's memory: from now on, their bytes are to be sent.
  bool unreadable = false;
  std::vector<std::uint32_t> chunks;
  static void fields(auto& self, auto& visit) {
    visit(self.manifest, self.unreadable, self.chunks);
  }
};

// Where some bytes of a peer are, for another peer of its host.
struct SharedBytes {
  std::uint64_t memory = 0;  // its number
  std::uint64_t offset = 0;
  static void fields(auto& self, auto& visit) { visit(self.memory, self.offset); }
};

// A holder's answer to a request for chunks.
struct Located {
  struct Chunk {
    std::uint32_t number = 0;
    SharedBytes at;
    static void fields(auto& self, auto& visit) { visit(self.number, self.at); }
  };
  std::vector<Chunk> chunks;
  static void fields(auto& self, auto& visit) { visit(self.chunks); }
};

// Memory that peers of one host let each other read during a transfer. *one thread: the engine's*
class NeighbourMemory {
 public:
  virtual ~NeighbourMemory() = default;
  // Lets `peer` read these bytes of this process. Empty: it cannot.
  [[nodiscard]] virtual std::optional<SharedBytes> share(const PeerId& peer,
                                                         const std::uint8_t* data,
                                                         std::uint64_t bytes) = 0;
  // Memory that `peer` lets this one read, valid until the next event. Empty: it has not arrived.
  // No bytes: it has, and cannot be mapped.
  [[nodiscard]] virtual std::optional<std::span<const std::uint8_t>> memory_of(
      const PeerId& peer, std::uint64_t number) const = 0;
  // The transfer is over: nobody is to read what share() has passed on for it.
  virtual void stop_sharing() = 0;
};

struct TransferOptions {
  bool waits = false;            // if there are replacements(), overwrites nothing before go_on()
  Parallel* parallel = nullptr;  // valid as long as the state's memory; null: one part at a time
};

struct TransferEvents {
  // This receiver knows what it will receive. Repeated when that changes.
  bool planned = false;
  // This receiver has everything (ok), or no source is left (peer_lost).
  std::optional<Error> over;
};

// One sync's transfer at a time. *one thread: the engine's*
class Transfer {
 public:
  Transfer(std::shared_ptr<BufferPool> pool, link::Carrier& links, NeighbourMemory& neighbours)
      : pool_(std::move(pool)), links_(links), neighbours_(neighbours) {}

  // Starts the transfer of the elected state. Memory of `mine` must stay valid until end(). Where
  // it is overwritten, its hashes change with it.
  void begin(const SyncId& id, const PeerId& self, std::shared_ptr<LocalState> mine,
             const wire::SyncDecision& decision, const TransferOptions& options);
  void go_on();
  // Ends the transfer; no memory is used afterwards. Returns the update, which has changes if this
  // is a receiver that has everything. Null: no transfer was active.
  std::unique_ptr<Update> end();
  [[nodiscard]] TransferEvents take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] bool active() const { return active_; }
  // This is a receiver that does not have everything yet.
  [[nodiscard]] bool receiving() const {
    return active_ && (phase_ == Phase::manifest || phase_ == Phase::chunks) && !over_;
  }
  [[nodiscard]] const wire::SyncDecision& decision() const { return decision_; }
  // Peers to which a link is needed while the transfer is active.
  [[nodiscard]] const std::vector<PeerId>& partners() const { return partners_; }
  [[nodiscard]] std::uint64_t bytes_done() const {
    return earlier_ + (plan_ ? plan_->bytes_done() : 0);
  }
  [[nodiscard]] std::uint64_t bytes_wanted() const {
    return earlier_ + (plan_ ? plan_->bytes_wanted() : 0);
  }

  // See FetchPlan.
  [[nodiscard]] std::vector<wire::StateEntry> replacements() const {
    return plan_ ? plan_->replacements() : std::vector<wire::StateEntry>();
  }
  [[nodiscard]] std::vector<BufferPtr> memory() const {
    return plan_ ? plan_->memory() : std::vector<BufferPtr>();
  }
  // This receiver stops fetching. Never reported as over.
  void stop();

  void set_members(const std::vector<wire::Member>& members);
  void link_up(const PeerId& peer);
  // The stripes to `peer` are closed. `unsent`: the bytes that were queued on them.
  void link_down(const PeerId& peer, const link::UnsentBytes& unsent);
  // Called regularly. Drops sources that owe chunks and have sent nothing for `limit`.
  void on_time(Instant now, Duration limit);
  // The peer cannot be reached.
  void link_failed(const PeerId& peer, const std::string& why) { drop_source(peer, why); }
  // Drops requests of earlier admissions.
  void forget_before(std::uint64_t admission);

  // -- events of links
  link::Placement place(const PeerId& from, const link::FrameHeader& header);
  Status arrived(const PeerId& from, const link::FrameHeader& header, Buffer buffer);
  void voided(const PeerId& from, const link::FrameHeader& header);
  void interrupted(const link::FrameHeader& header);
  Status control(const PeerId& from, const link::FrameHeader& header,
                 std::span<const std::uint8_t> payload);
  bool next(const PeerId& to, link::OutgoingFrame& frame);

  // Chunks wait in memory of neighbours: call read().
  [[nodiscard]] bool has_work() const;
  // Reads them, in parallel.
  void read();

 private:
  enum class Phase : std::uint8_t { serving, manifest, chunks, complete };
  enum class Request : std::uint8_t { none, asked, placed };  // placed: it is being received
  // A chunk that was requested and has not been received.
  struct Asked {
    std::uint32_t number = 0;
    std::optional<SharedBytes> at;  // it is to be read there
  };
  // A holder, as a receiver sees it.
  struct Source {
    bool up = false;
    std::vector<Asked> asked;
    std::optional<Instant> idle_since;
    std::optional<Instant> unread_since;  // memory of chunks to be read has not arrived
    [[nodiscard]] Asked* find(std::uint32_t number);
    void received(std::uint32_t number);
    [[nodiscard]] bool reads() const;  // some chunks are to be read
  };
  // A receiver, as a holder sees it: what it has requested.
  struct Client {
    bool manifest = false;
    bool cannot_read = false;  // our memory
    std::deque<std::uint32_t> chunks;
  };
  void ask();
  void ask_manifest();
  [[nodiscard]] bool busy(const PeerId& peer, const Source& source) const;
  void send_fetch(const PeerId& to, const Fetch& fetch);
  void ask_for_bytes(const PeerId& peer, Source& source);
  Status on_fetch(const PeerId& from, const SyncId& id, std::span<const std::uint8_t> payload);
  Status on_located(const PeerId& from, const SyncId& id, std::span<const std::uint8_t> payload);
  void read_from(const PeerId& peer);
  bool locate(const PeerId& to, Client& client, link::OutgoingFrame& frame);
  void release();
  void take_manifest(const PeerId& from, std::span<const std::uint8_t> bytes);
  void retry(const std::vector<Asked>& chunks);
  void drop_source(const PeerId& peer, const std::string& why);
  void drop_plan();
  void check_over();
  void finish(Code code, std::string reason);
  [[nodiscard]] link::FrameHeader header(link::FrameType type) const;

  std::shared_ptr<BufferPool> pool_;
  link::Carrier& links_;
  NeighbourMemory& neighbours_;
  TransferEvents events_;
  bool active_ = false;
  bool over_ = false;       // `over` was reported, or this receiver has stopped
  bool releasing_ = false;  // frames voided meanwhile are released by us
  SyncId id_;
  SyncId newest_;  // the last sync that began here
  std::uint64_t token_ = 0;
  std::shared_ptr<LocalState> mine_;
  std::optional<ChunkIndex> my_index_;
  wire::SyncDecision decision_;
  std::vector<PeerId> partners_;

  // receiving
  Phase phase_ = Phase::serving;
  bool newcomer_ = false;  // receives loose entries too
  TransferOptions options_;
  std::map<PeerId, Source> sources_;
  std::vector<PeerId> order_;  // sources; the first one sends the manifest
  Request manifest_ = Request::none;
  std::optional<FetchPlan> plan_;      // once the manifest has arrived
  std::uint64_t earlier_ = 0;          // bytes that arrived for plans that were dropped
  std::vector<wire::Member> members_;  // of the present epoch, for names
  std::string last_failure_;

  // sending
  wire::Bytes my_manifest_;  // encoded
  std::map<PeerId, Client> clients_;
  std::map<PeerId, std::deque<link::OutgoingFrame>> fetches_;
  // Requests that arrived before the election: for the newest sync of each peer.
  std::map<PeerId, std::pair<SyncId, Client>> early_;
  std::uint64_t tx_bytes_ = 0;
  Instant ticked_{};
};

// The holders from which a receiver fetches. Both ends compute the same.
[[nodiscard]] std::vector<PeerId> sources_of(const wire::SyncDecision& decision,
                                             const PeerId& receiver);

}  // namespace pccl::state

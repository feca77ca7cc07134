// Moves a shared state: holders send chunks from their own memory, receivers ask for what differs,
// from several holders at once, check every chunk, and keep it apart until the sync is over.
// Sans-I/O: stripes ask it where bytes go and what to send next.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/error.h"
#include "pccl/link/carrier.h"
#include "pccl/link/stripe.h"
#include "pccl/state/manifest.h"

namespace pccl::state {

// Names a sync on the links: its admission and its number.
struct SyncId {
  std::uint64_t admission = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const SyncId&) const = default;
};

// A receiver asks for these chunks, by number; or for the manifest.
struct Fetch {
  bool manifest = false;
  std::vector<std::uint32_t> chunks;
  static void fields(auto& self, auto& visit) { visit(self.manifest, self.chunks); }
};

// What a sync changed here, still beside the old state.
struct Update {
  struct Copy {
    std::uint8_t* to = nullptr;
    const std::uint8_t* from = nullptr;
    std::uint64_t bytes = 0;
  };
  struct Replacement {
    wire::StateEntry what;
    Buffer bytes;  // none for an empty entry
  };
  std::vector<Copy> copies;          // to be made in this order, before replacements are complete
  std::vector<std::string> written;  // names of these entries
  std::vector<Replacement> replacements;  // the others, whole
  std::vector<Buffer> staging;
  std::uint64_t tx_bytes = 0;  // of chunks
  std::uint64_t rx_bytes = 0;
  wire::SyncDecision decision;
};

struct TransferEvents {
  // This receiver knows what it is to receive; also again, when that has changed.
  bool planned = false;
  // This receiver has everything (ok), or nobody is left to give it (peer_lost).
  std::optional<Error> over;
};

// One sync's transfer at a time. *one thread: the engine's*
class Transfer {
 public:
  Transfer(std::shared_ptr<BufferPool> pool, link::Carrier& links)
      : pool_(std::move(pool)), links_(links) {}

  // The master has elected. Memory of `mine` must stay valid until end().
  void begin(const SyncId& id, const PeerId& self, std::shared_ptr<const LocalState> mine,
             const wire::SyncDecision& decision);
  // No memory is used any more when this returns. The update of a receiver that has everything.
  std::unique_ptr<Update> end();
  [[nodiscard]] TransferEvents take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] bool active() const { return active_; }
  // Chunks are still missing here.
  [[nodiscard]] bool receiving() const {
    return active_ && (phase_ == Phase::manifest || phase_ == Phase::chunks) && !over_;
  }
  [[nodiscard]] const wire::SyncDecision& decision() const { return decision_; }
  // Peers to have a link to while it runs; none when it does not.
  [[nodiscard]] const std::vector<PeerId>& partners() const { return partners_; }
  [[nodiscard]] std::uint64_t bytes_done() const { return bytes_done_; }
  [[nodiscard]] std::uint64_t bytes_wanted() const { return bytes_wanted_; }

  // Entries of the elected state that are new here, or take the place of what cannot be written.
  [[nodiscard]] std::vector<wire::StateEntry> replacements() const;
  // This receiver takes no more part; it is never over.
  void stop();

  // The members are these now.
  void set_members(const std::vector<wire::Member>& members);
  void link_up(const PeerId& peer);
  // Its stripes are closed. `unsent`: of what was lined up on them.
  void link_down(const PeerId& peer, const link::UnsentBytes& unsent);
  // Now and then. Sources that have sent nothing of what they were asked for `limit` are dropped.
  void on_time(Instant now, Duration limit);
  // There is no way to that peer.
  void give_up(const PeerId& peer, const std::string& why) { drop_source(peer, why); }
  // What was asked of earlier admissions is forgotten.
  void forget_before(std::uint64_t admission);

  // -- the link's side
  link::Placement place(const PeerId& from, const link::FrameHeader& header);
  Status arrived(const PeerId& from, const link::FrameHeader& header, Buffer buffer);
  void voided(const PeerId& from, const link::FrameHeader& header);
  void interrupted(const link::FrameHeader& header);
  Status control(const PeerId& from, const link::FrameHeader& header,
                 std::span<const std::uint8_t> payload);
  bool next(const PeerId& to, link::OutgoingFrame& frame);

 private:
  enum class Phase : std::uint8_t { serving, manifest, chunks, complete };
  // A holder, seen by a receiver.
  struct Source {
    bool up = false;
    std::vector<std::uint32_t> asked;  // and not yet here
    std::optional<Instant> idle_since;
  };
  // A receiver, seen by a holder; what goes to it.
  struct Client {
    bool manifest = false;
    std::deque<std::uint32_t> chunks;
  };
  // An entry that is being received.
  struct Incoming {
    std::uint32_t entry = 0;  // of the elected manifest
    const LocalEntry* mine = nullptr;
    Buffer memory;  // whole for a replacement, else the differing chunks one after the other
  };
  // A chunk that is being received.
  struct Wanted {
    std::uint8_t* to = nullptr;
    std::uint64_t bytes = 0;
    bool loose = false;
    bool placed = false;  // a frame with it is being received
  };

  void ask();
  void ask_manifest();
  [[nodiscard]] bool busy(const PeerId& peer, const Source& source) const;
  void send_fetch(const PeerId& to, const Fetch& fetch);
  void release();
  void take_manifest(const PeerId& from, std::span<const std::uint8_t> bytes);
  void plan();
  void drop_source(const PeerId& peer, const std::string& why);
  void check_over();
  [[nodiscard]] link::FrameHeader header(link::FrameType type) const;
  [[nodiscard]] std::uint64_t window() const;

  std::shared_ptr<BufferPool> pool_;
  link::Carrier& links_;
  TransferEvents events_;
  bool active_ = false;
  bool over_ = false;       // it was said
  bool releasing_ = false;  // what is voided now is voided by us
  SyncId id_;
  SyncId newest_;  // the last that began here
  PeerId self_;
  std::uint64_t token_ = 0;
  std::shared_ptr<const LocalState> mine_;
  std::optional<ChunkIndex> my_index_;
  wire::SyncDecision decision_;
  std::vector<PeerId> partners_;

  // receiving
  Phase phase_ = Phase::serving;
  bool newcomer_ = false;  // loose entries too
  std::map<PeerId, Source> sources_;
  std::vector<PeerId> order_;  // sources, the one whose manifest counts first
  bool manifest_asked_ = false;
  bool manifest_placed_ = false;
  wire::Bytes manifest_bytes_;
  Manifest elected_;
  std::optional<ChunkIndex> index_;
  std::vector<Incoming> incoming_;
  std::vector<Update::Copy> kept_;  // what replacements take over from our own entries
  std::map<std::uint32_t, Wanted> wanted_;
  std::deque<std::uint32_t> todo_;        // strict chunks, of anybody
  std::deque<std::uint32_t> loose_todo_;  // of the first source
  std::uint64_t left_ = 0;                // chunks not here yet
  std::uint64_t bytes_done_ = 0;
  std::uint64_t bytes_wanted_ = 0;
  std::string last_failure_;

  // sending
  wire::Bytes my_manifest_;  // encoded
  std::map<PeerId, Client> clients_;
  std::map<PeerId, std::deque<link::OutgoingFrame>> fetches_;
  // Asked before we heard of the election: the newest sync of each peer.
  std::map<PeerId, std::pair<SyncId, Client>> early_;
  std::uint64_t tx_bytes_ = 0;
  std::uint64_t rx_bytes_ = 0;
  Instant ticked_{};
};

// The holders that a receiver asks; the same on both ends.
[[nodiscard]] std::vector<PeerId> sources_of(const wire::SyncDecision& decision,
                                             const PeerId& receiver);

}  // namespace pccl::state

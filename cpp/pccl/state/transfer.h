// Moves a shared state: holders send chunks from their own memory, receivers ask for what differs,
// from several holders at once, check every chunk, and keep it apart until the sync is over.
// Sans-I/O: stripes ask it where bytes go and what to send next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/error.h"
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
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit(self.manifest, self.chunks);
  }
};

// What a sync changed here, still beside the old state.
struct Update {
  struct Copy {
    std::uint8_t* to = nullptr;
    const std::uint8_t* from = nullptr;  // memory of `staging`
    std::uint64_t bytes = 0;
  };
  struct Replacement {
    wire::StateEntry what;
    Buffer bytes;  // none for an empty entry
  };
  std::vector<Copy> copies;               // into the memory of entries that can be written
  std::vector<std::string> written;       // names of these entries
  std::vector<Replacement> replacements;  // the others, whole
  std::vector<Buffer> staging;
  std::uint64_t tx_bytes = 0;  // of chunks
  std::uint64_t rx_bytes = 0;
  wire::SyncDecision decision;
};

// What the transfer needs around it. Called from inside its methods.
class TransferHost {
 public:
  virtual ~TransferHost() = default;
  virtual void wake_for_state(const PeerId& peer) = 0;
  [[nodiscard]] virtual bool link_up(const PeerId& peer) const = 0;
  virtual void release_state(const PeerId& peer, std::uint64_t token) = 0;
  [[nodiscard]] virtual bool state_checked(const PeerId& peer) const = 0;
  // This receiver has everything (ok), or nobody is left to give it (peer_lost).
  virtual void transfer_over(Code code, const std::string& reason) = 0;
};

// One sync's transfer at a time. *one thread: the engine's*
class Transfer {
 public:
  Transfer(std::shared_ptr<BufferPool> pool, TransferHost& host)
      : pool_(std::move(pool)), host_(host) {}

  // The master has elected. Memory of `mine` must stay valid until end().
  void begin(const SyncId& id, const PeerId& self, std::shared_ptr<const LocalState> mine,
             const wire::SyncDecision& decision);
  // No memory is used any more when this returns. The update of a receiver that has everything.
  std::unique_ptr<Update> end();
  [[nodiscard]] bool active() const { return active_; }
  // Chunks are still missing here.
  [[nodiscard]] bool receiving() const {
    return active_ && (phase_ == Phase::manifest || phase_ == Phase::chunks) && !over_;
  }
  [[nodiscard]] const wire::SyncDecision& decision() const { return decision_; }
  // Peers to have a link to while it runs.
  [[nodiscard]] const std::vector<PeerId>& partners() const { return partners_; }
  [[nodiscard]] std::uint64_t bytes_done() const { return bytes_done_; }
  [[nodiscard]] std::uint64_t bytes_wanted() const { return bytes_wanted_; }

  // The members are these now.
  void set_members(const std::vector<wire::Member>& members);
  void link_changed(const PeerId& peer, bool up);
  // There is no way to that peer.
  void give_up(const PeerId& peer, const std::string& why) { drop_source(peer, why); }
  // What was asked of earlier admissions is forgotten.
  void forget_before(std::uint64_t admission);

  // -- the link's side
  link::Placement place(const PeerId& from, const link::FrameHeader& header);
  Status arrived(const PeerId& from, const link::FrameHeader& header, Buffer buffer);
  void voided(const PeerId& from, const link::FrameHeader& header);
  Status control(const PeerId& from, const link::FrameHeader& header,
                 std::span<const std::uint8_t> payload);
  bool next(const PeerId& to, link::OutgoingFrame& frame);

 private:
  enum class Phase : std::uint8_t { serving, manifest, chunks, complete };
  // A holder, seen by a receiver.
  struct Source {
    bool up = false;
    std::vector<std::uint32_t> asked;  // and not yet here
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
    bool done = false;
  };

  void ask();
  void ask_manifest();
  void send_fetch(const PeerId& to, const Fetch& fetch);
  void release();
  void take_manifest(const PeerId& from, std::span<const std::uint8_t> bytes);
  void plan();
  void drop_source(const PeerId& peer, const std::string& why);
  void check_over();
  [[nodiscard]] link::FrameHeader header(link::FrameType type) const;
  [[nodiscard]] std::uint64_t window() const;

  std::shared_ptr<BufferPool> pool_;
  TransferHost& host_;
  bool active_ = false;
  bool over_ = false;       // transfer_over was called
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
  wire::Bytes manifest_bytes_;
  Manifest elected_;
  std::optional<ChunkIndex> index_;
  std::vector<Incoming> incoming_;
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
  std::map<SyncId, std::map<PeerId, Client>> early_;  // asked before we heard of the election
  std::uint64_t tx_bytes_ = 0;
  std::uint64_t rx_bytes_ = 0;
};

// The holders that a receiver asks; the same on both ends.
[[nodiscard]] std::vector<PeerId> sources_of(const wire::SyncDecision& decision,
                                             const PeerId& receiver);

}  // namespace pccl::state

// The transfer of a shared state: consistent and nearly consistent manifests, chunks and requests
// from an arbitrary peer.
#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "fuzz.h"
#include "pccl/state/transfer.h"

namespace pccl::fuzz {
namespace {

constexpr state::SyncId kSync{5, 2};
constexpr std::uint32_t kManifestSegment = 0xffffffff;

class Play final : private link::Carrier {
 public:
  Play(bool receives, const wire::Digest& content)
      : transfer_(std::make_shared<BufferPool>(0), *this) {
    wire::SyncDecision decision;
    decision.step = wire::SyncStep::transfer;
    decision.content = content;
    decision.holders =
        receives ? std::vector<PeerId>{peer(1), peer(2)} : std::vector<PeerId>{peer(0)};
    decision.receivers =
        receives ? std::vector<PeerId>{peer(0)} : std::vector<PeerId>{peer(1), peer(2)};
    decision.newcomers = decision.receivers;
    transfer_.begin(kSync, peer(0), mine_.state, decision, false);
  }
  ~Play() override { (void)transfer_.end(); }

  void step(Script& script) {
    const std::uint8_t what = script.byte();
    const PeerId from = peer(static_cast<std::uint8_t>(what / 16 % 4));
    link::FrameHeader header;
    header.key.admission = kSync.admission;
    header.key.sequence = kSync.sequence + (what % 16 == 15 ? 1 : 0);
    switch (what % 16) {
      case 0:
        if (script.byte() % 2 != 0) {
          transfer_.link_up(from);
        } else {
          transfer_.link_down(from, {});
        }
        break;
      case 1:
        now_ += std::chrono::seconds(script.byte());
        transfer_.on_time(now_, std::chrono::seconds(16));
        break;
      case 2: {
        link::OutgoingFrame frame;
        for (int i = 0; i < 4 && transfer_.next(from, frame); ++i) {
        }
        break;
      }
      case 3:
        manifest(from, header, script.piece());
        break;
      case 4:
        transfer_.link_failed(from, "no way");
        break;
      case 5:
      case 6:
      case 7:
        chunk(from, header, script);
        break;
      default: {
        const auto payload = script.piece();
        header.type = link::FrameType::fetch;
        header.payload_bytes = static_cast<std::uint32_t>(payload.size());
        header.checksum = what % 16 == 8 ? 0 : 1;
        (void)transfer_.control(from, header, payload);
      }
    }
  }

 private:
  // Reads the bytes as a manifest and corrects its hashes, so that it is not refused for these
  // alone.
  void manifest(const PeerId& from, link::FrameHeader header, std::span<const std::uint8_t> bytes) {
    state::Manifest manifest;
    wire::Reader reader(bytes);
    reader(manifest);
    wire::Bytes fixed(bytes.begin(), bytes.end());
    if (reader.complete()) {
      must(wire::encoded(manifest) == fixed, "a manifest comes back as it was");
      std::uint64_t at = 0;
      for (wire::StateEntry& entry : manifest.entries) {
        const std::uint64_t left = manifest.chunks.size() - at;
        const std::uint64_t count =
            std::min(left, entry.bytes > (left << 20) ? left : state::chunk_count(entry.bytes));
        entry.content = state::entry_content(entry, std::span(manifest.chunks).subspan(at, count));
        at += count;
      }
      fixed = wire::encoded(manifest);
    }
    header.type = link::FrameType::state;
    header.segment = kManifestSegment;
    header.payload_bytes = static_cast<std::uint32_t>(fixed.size());
    put(from, header, fixed);
  }

  void chunk(const PeerId& from, link::FrameHeader header, Script& script) {
    const std::uint8_t how = script.byte();
    header.type = link::FrameType::state;
    header.segment = script.byte();
    static const Arrays theirs(8);
    const auto& entries = theirs.state->entries;
    const state::ChunkIndex index(theirs.state->manifest.entries);
    wire::Bytes bytes(script.pair());
    if (how % 4 != 0 && header.segment < index.count()) {
      const state::ChunkRange range = index.at(header.segment);
      const std::uint8_t* data = entries[range.entry].data + range.offset;
      bytes.assign(data, data + range.bytes);
      if (how % 4 == 1) bytes[0] ^= 1;
    }
    header.payload_bytes = static_cast<std::uint32_t>(bytes.size());
    put(from, header, bytes, how % 8 == 7);
  }

  void put(const PeerId& from, const link::FrameHeader& header, std::span<const std::uint8_t> bytes,
           bool given_up = false) {
    if (header.payload_bytes == 0) return;
    link::Placement placement = transfer_.place(from, header);
    if (placement.kind != link::Placement::Kind::store) return;
    std::size_t room = 0;
    for (const iovec& part : placement.where) room += part.iov_len;
    must(room == header.payload_bytes, "what is stored has a place, whole");
    for (const iovec& part : placement.where) {
      std::copy_n(bytes.begin(), part.iov_len, static_cast<std::uint8_t*>(part.iov_base));
      bytes = bytes.subspan(part.iov_len);
    }
    if (given_up) return transfer_.voided(from, header);
    (void)transfer_.arrived(from, header, std::move(placement.buffer));
  }

  void wake(const PeerId&) override {}
  std::uint64_t release(const PeerId&, std::uint64_t) override { return 0; }
  std::uint64_t unsent(const PeerId&, std::uint64_t) const override { return 0; }
  bool is_up(const PeerId& id) const override { return id == peer(1); }
  bool is_checked(const PeerId&) const override { return true; }

  Arrays mine_{7};
  state::Transfer transfer_;
  Instant now_{std::chrono::seconds(1000)};
};

}  // namespace

}  // namespace pccl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pccl::fuzz;
  Script script(data, size);
  static const Arrays theirs(8);
  Play play(script.byte() % 4 != 0, pccl::state::content_of(theirs.state->manifest.entries, false));
  for (int steps = 0; !script.empty() && steps < 60; ++steps) play.step(script);
  return 0;
}

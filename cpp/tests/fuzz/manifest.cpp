// The transfer of a shared state: consistent and nearly consistent manifests, chunks, requests and
// places in memory from an arbitrary peer.
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

class Play final : private link::Carrier, private state::NeighbourMemory {
 public:
  Play(bool receives, bool overwrites, bool waits, const wire::Digest& content)
      : transfer_(std::make_shared<BufferPool>(0), *this, *this) {
    wire::SyncDecision decision;
    decision.step = wire::SyncStep::transfer;
    decision.content = content;
    decision.holders =
        receives ? std::vector<PeerId>{peer(1), peer(2)} : std::vector<PeerId>{peer(0)};
    decision.receivers =
        receives ? std::vector<PeerId>{peer(0)} : std::vector<PeerId>{peer(1), peer(2)};
    decision.newcomers = decision.receivers;
    mine_.state->overwrite = overwrites;
    transfer_.begin(kSync, peer(0), mine_.state, decision, {.waits = waits});
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
      case 9:
        located(from, header, script);
        break;
      case 10:
        transfer_.read();
        check();
        break;
      case 11:
        transfer_.go_on();
        check();
        break;
      default: {
        const auto payload = script.piece();
        header.type = what % 16 == 12 ? link::FrameType::located : link::FrameType::fetch;
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
    const auto& entries = theirs().state->entries;
    const state::ChunkIndex index(theirs().state->manifest.entries);
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

  // Places of chunks, most of them as they are: memory i is the array i.
  void located(const PeerId& from, link::FrameHeader header, Script& script) {
    state::Located places;
    const state::ChunkIndex index(theirs().state->manifest.entries);
    for (int count = script.byte() % 5; count > 0; --count) {
      const std::uint32_t number = script.byte();
      state::SharedBytes at{script.byte(), script.pair()};
      if (number < index.count() && at.memory % 4 != 0)
        at = {index.at(number).entry, index.at(number).offset};
      places.chunks.push_back({number, at});
    }
    const wire::Bytes payload = wire::encoded(places);
    header.type = link::FrameType::located;
    header.payload_bytes = static_cast<std::uint32_t>(payload.size());
    header.checksum = 1;
    (void)transfer_.control(from, header, payload);
  }

  // The hashes are those of the memory.
  void check() {
    const state::LocalState& state = *mine_.state;
    const state::ChunkIndex index(state.manifest.entries);
    for (std::uint64_t chunk = 0; chunk < index.count(); ++chunk) {
      const wire::Digest& known = state.manifest.chunks[chunk];
      const state::ChunkRange range = index.at(chunk);
      const std::uint8_t* data = state.entries[range.entry].data + range.offset;
      must(known == wire::Digest{} || known == state::digest({data, range.bytes}),
           "a hash is that of its memory");
    }
  }

  static const Arrays& theirs() {
    static const Arrays arrays(8);
    return arrays;
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
  std::optional<state::SharedBytes> share(const PeerId& reader, const std::uint8_t*,
                                          std::uint64_t) override {
    return reader == peer(1) ? std::optional<state::SharedBytes>({1, 0}) : std::nullopt;
  }
  void stop_sharing() override {}
  std::optional<std::span<const std::uint8_t>> memory_of(const PeerId& of,
                                                         std::uint64_t number) const override {
    const auto& entries = theirs().state->entries;
    if (of == peer(2) || number > entries.size()) return std::nullopt;
    if (number == entries.size()) return std::span<const std::uint8_t>();
    const state::LocalEntry& entry = entries[number];
    return std::span(entry.data, static_cast<std::size_t>(entry.what.bytes));
  }

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
  const std::uint8_t how = script.byte();
  Play play(how % 4 != 0, how / 4 % 2 != 0, how / 8 % 2 != 0,
            pccl::state::content_of(theirs.state->manifest.entries, false));
  for (int steps = 0; !script.empty() && steps < 60; ++steps) play.step(script);
  return 0;
}

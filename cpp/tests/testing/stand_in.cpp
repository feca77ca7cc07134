// Stripes that end, the frames that other stripes must send instead, and the number of stripes of a
// link.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <list>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/link/stripe.h"
#include "pccl/link/stripe_tuner.h"
#include "tests/testing/frames.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace wire = pccl::wire;

namespace {

namespace stripes = pccl::link;

// Sends the given frames, and stores arriving ones.
class End final : public stripes::Traffic {
 public:
  stripes::Placement place(stripes::Stripe&, const stripes::FrameHeader& header) override {
    memory_.emplace_back(header.payload_bytes);
    stripes::Placement placement;
    placement.kind = stripes::Placement::Kind::store;
    placement.where = {{memory_.back().data(), memory_.back().size()}};
    placement.token = 1;
    return placement;
  }
  pccl::Status arrived(stripes::Stripe&, const stripes::FrameHeader& header, std::uint64_t,
                       pccl::Buffer) override {
    arrived_.push_back(header.segment);
    return {};
  }
  void voided(stripes::Stripe&, const stripes::FrameHeader&, std::uint64_t) override { ++voided_; }
  void drained(stripes::Stripe&, const stripes::FrameHeader&) override {}
  void interrupted(stripes::Stripe&, const stripes::FrameHeader&, std::uint64_t) override {
    ++interrupted_;
  }
  pccl::Status control(stripes::Stripe&, const stripes::FrameHeader&,
                       std::span<const std::uint8_t>) override {
    return {};
  }
  bool next(stripes::Stripe&, stripes::OutgoingFrame& frame) override {
    if (to_send_.empty()) return false;
    frame = std::move(to_send_.front());
    to_send_.pop_front();
    return true;
  }

  std::deque<stripes::OutgoingFrame> to_send_;
  std::vector<std::uint32_t> arrived_;
  std::uint32_t voided_ = 0;
  std::uint32_t interrupted_ = 0;

 private:
  std::list<wire::Bytes> memory_;
};

std::uint32_t segment_of(const stripes::OutgoingFrame& frame) {
  return stripes::decode(frame.header)->segment;
}

// Sends numbered data frames of these sizes on one stripe, which ends when `written` bytes were
// written, of which `read` arrived; the byte at `spoilt` is changed. `told`: the number of reads
// between confirmations to the sender; 0: none. `released`: the operation ends before the stripe
// does. Returns the frames that arrived, the number of whole ones, the frames that would be sent
// again, those that were never begun, and the number of interruptions of stored frames.
std::tuple<std::vector<std::uint32_t>, std::uint64_t, std::vector<std::uint32_t>,
           std::vector<std::uint32_t>, std::uint32_t>
stand_in(const std::vector<std::uint32_t>& sizes, std::size_t written, std::size_t read,
         const std::vector<std::size_t>& pieces, std::int64_t spoilt, std::size_t told,
         bool released) {
  End sender;
  End receiver;
  std::list<wire::Bytes> payloads;
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    wire::Bytes& payload = payloads.emplace_back(sizes[i], static_cast<std::uint8_t>(i));
    sender.to_send_.push_back(pccl::tests::data_frame(i, payload));
  }
  stripes::Stripe from(1, sender);
  stripes::Stripe to(2, receiver);
  from.keep();
  to.keep();
  wire::Bytes stream;
  std::size_t at = 0;
  bool ended = false;
  for (std::size_t turn = 0; !ended; ++turn) {
    const std::size_t piece = pieces.empty() ? 4096 : pieces[turn % pieces.size()];
    const auto out = from.outgoing();
    std::size_t left = std::min(piece, written - std::min(written, stream.size()));
    const bool all_written = out.empty() || left == 0;
    std::size_t sent = 0;
    for (const iovec& part : out) {
      const std::size_t size = std::min(left, part.iov_len);
      const auto* bytes = static_cast<const std::uint8_t*>(part.iov_base);
      stream.insert(stream.end(), bytes, bytes + size);
      left -= size;
      sent += size;
    }
    from.sent(sent);
    const std::size_t until = std::min({stream.size(), read, at + piece});
    for (const iovec& part : to.incoming()) {
      for (std::size_t i = 0; i < part.iov_len && at < until; ++i, ++at) {
        const bool change = std::cmp_equal(at, spoilt);
        static_cast<std::uint8_t*>(part.iov_base)[i] =
            static_cast<std::uint8_t>(stream[at] ^ (change ? 0x10 : 0));
      }
    }
    const std::uint64_t before = to.bytes_received();
    if (at > before) ended = !to.received(at - before);
    ended = ended || (all_written && at >= std::min(stream.size(), read));
    if (told > 0 && turn % told == 0 && !from.confirm(to.frames_received()))
      throw std::runtime_error("a true word was not believed");
  }
  if (from.confirm(sizes.size() + 1)) throw std::runtime_error("an impossible word was believed");
  if (released) (void)from.release(1);
  const std::uint64_t received = to.frames_received();
  const stripes::LeftFrames left = from.end();
  (void)to.end();
  std::vector<std::uint32_t> again;
  for (std::size_t i = received - left.first; i < left.frames.size(); ++i) {
    if (!left.frames[i].released) again.push_back(segment_of(left.frames[i]));
  }
  std::vector<std::uint32_t> waiting;
  for (const stripes::OutgoingFrame& frame : sender.to_send_) waiting.push_back(segment_of(frame));
  return {receiver.arrived_, received, again, waiting, receiver.interrupted_};
}

// The number of stripes that a link wants after each window (bytes, seconds, whether it was busy
// throughout and complete).
std::vector<std::uint32_t> tune(
    std::uint32_t first, std::uint32_t least, std::uint32_t most,
    const std::vector<std::tuple<std::uint64_t, double, bool, bool>>& windows) {
  stripes::StripeTuner tuner(stripes::StripeTuner::Options{first, least, most});
  std::vector<std::uint32_t> wanted{tuner.wanted()};
  for (const auto& [bytes, seconds, busy, complete] : windows) {
    tuner.window(bytes, seconds, busy, complete);
    wanted.push_back(tuner.wanted());
  }
  return wanted;
}

// The final number of stripes on a path that carries rates[stripes] bytes per second.
std::uint32_t settle(std::uint32_t first, std::uint32_t least, std::uint32_t most,
                     const std::vector<double>& rates, std::uint32_t windows) {
  stripes::StripeTuner tuner(stripes::StripeTuner::Options{first, least, most});
  for (std::uint32_t i = 0; i < windows; ++i) {
    const std::size_t at = std::min<std::size_t>(tuner.wanted(), rates.size() - 1);
    tuner.window(static_cast<std::uint64_t>(rates[at]), 1, true, true);
  }
  return tuner.wanted();
}

}  // namespace

void bind_stand_in(nb::module_& m) {
  m.def("stand_in", &stand_in, "sizes"_a, "written"_a, "read"_a, "pieces"_a, "spoilt"_a = -1,
        "told"_a = 0, "released"_a = false);
  m.def("tune_stripes", &tune, "first"_a, "least"_a, "most"_a, "windows"_a);
  m.def("settle_stripes", &settle, "first"_a, "least"_a, "most"_a, "rates"_a, "windows"_a);
}

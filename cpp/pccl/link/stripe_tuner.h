// How many stripes a link should have: as many as raise its rate. Pure: its input is bytes moved.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pccl::link {

// Hill climbing. While the link is busy, it adds stripes and keeps them if the rate rises by a
// twentieth. Otherwise it removes them and tries again after a pause, since the path may change.
// The pause doubles with each failure. *one thread: its owner's*
class StripeTuner {
 public:
  struct Options {
    std::uint32_t first = 16;
    std::uint32_t least = 2;
    std::uint32_t most = 32;
  };
  // A window with a lower rate is ignored: it does not show the path's capacity.
  static constexpr double kBusyBytesPerSecond = 256 << 10;

  StripeTuner() = default;
  explicit StripeTuner(const Options& options)
      : options_(options), wanted_(std::clamp(options.first, options.least, options.most)) {}
  // Always `fixed` stripes.
  explicit StripeTuner(std::uint32_t fixed) : options_{fixed, fixed, fixed}, wanted_(fixed) {}

  [[nodiscard]] std::uint32_t wanted() const { return wanted_; }

  // A window is over. `bytes`: moved in it, both ways together. `throughout`: transfers ran all the
  // time; other windows are ignored. `complete`: as many stripes as wanted were up all the time.
  void window(std::uint64_t bytes, double seconds, bool throughout, bool complete) {
    if (options_.least == options_.most || seconds <= 0) return;
    const double rate = static_cast<double>(bytes) / seconds;
    if (!throughout || rate < kBusyBytesPerSecond) {
      settling_ = true;  // connections start slowly, also after a pause
      return;
    }
    if (!complete) return;
    if (settling_) {
      settling_ = false;
      return;
    }
    if (tried_ == 0) {
      if (pause_ > 0) {
        --pause_;
        return;
      }
      // Try more first. After a failure try fewer: stripes cost memory and turns of the loop.
      const std::uint32_t step = std::max(2U, wanted_ / 3);
      const std::uint32_t other = down_next_
                                      ? std::max(options_.least, wanted_ - std::min(wanted_, step))
                                      : std::min(options_.most, wanted_ + step);
      if (other == wanted_) {
        down_next_ = !down_next_;
        pause_ = backoff_;
        return;
      }
      before_ = rate;
      tried_ = wanted_;
      wanted_ = other;
      settling_ = true;
      return;
    }
    const bool grew = wanted_ > tried_;
    const bool keeps = grew ? rate > 1.05 * before_ : rate > 0.98 * before_;
    if (keeps) {
      backoff_ = kFirstBackoff;
      pause_ = grew ? 0 : backoff_;
    } else {
      wanted_ = tried_;
      down_next_ = grew;
      settling_ = true;
      pause_ = backoff_;
      backoff_ = std::min(backoff_ * 2, kLastBackoff);
    }
    tried_ = 0;
  }

 private:
  static constexpr std::uint32_t kFirstBackoff = 4;  // windows
  static constexpr std::uint32_t kLastBackoff = 64;

  Options options_;
  std::uint32_t wanted_ = 1;
  std::uint32_t tried_ = 0;              // stripes before the current try; 0: no try
  double before_ = 0;                    // their rate, in bytes per second
  std::uint32_t pause_ = kFirstBackoff;  // windows until the next try
  std::uint32_t backoff_ = kFirstBackoff;
  bool settling_ = true;
  bool down_next_ = false;
};

}  // namespace pccl::link

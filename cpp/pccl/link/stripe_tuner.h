// How many stripes a link should have: as many as make it faster. Pure: fed with how much moved.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pccl::link {

// Climbs: while the link is busy it opens some more and keeps them if the rate rose by a twentieth,
// else closes them again and waits, each time longer, since the path may have changed. *one thread:
// its owner's*
class StripeTuner {
 public:
  struct Options {
    std::uint32_t first = 16;
    std::uint32_t least = 2;
    std::uint32_t most = 32;
  };
  // What is less than this in a window says nothing about the path.
  static constexpr double kBusyBytesPerSecond = 256 << 10;

  StripeTuner() = default;
  explicit StripeTuner(const Options& options)
      : options_(options), wanted_(std::clamp(options.first, options.least, options.most)) {}
  // Exactly so many, whatever happens.
  explicit StripeTuner(std::uint32_t fixed) : options_{fixed, fixed, fixed}, wanted_(fixed) {}

  [[nodiscard]] std::uint32_t wanted() const { return wanted_; }

  // A window is over in which so many bytes moved, both ways together. `throughout`: something was
  // waiting to be sent, or to come, all the time; other windows say nothing. `complete`: as many
  // stripes as wanted were up in all of it.
  void window(std::uint64_t bytes, double seconds, bool throughout, bool complete) {
    if (options_.least == options_.most || seconds <= 0) return;
    const double rate = static_cast<double>(bytes) / seconds;
    if (!throughout || rate < kBusyBytesPerSecond) {
      settling_ = true;  // connections begin slowly, again after a pause
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
      // More first; when that has just failed, fewer: they cost memory and turns.
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
  std::uint32_t tried_ = 0;              // how many there were before the try; 0: none under way
  double before_ = 0;                    // the rate with them
  std::uint32_t pause_ = kFirstBackoff;  // windows until the next try
  std::uint32_t backoff_ = kFirstBackoff;
  bool settling_ = true;
  bool down_next_ = false;
};

}  // namespace pccl::link

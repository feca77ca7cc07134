// Converts structs to bytes and back. A message is one struct with one field list (`fields`), used
// in both directions. Integers are little-endian and fixed-width; strings and lists have a 32-bit
// count. A reader allocates memory only for items that it has read, not for the count.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/base/utf8.h"

namespace pccl::wire {

// The version of the control protocol and of the links. A peer of another version is refused.
inline constexpr std::uint8_t kProtocolVersion = 9;

using Bytes = std::vector<std::uint8_t>;

// Longest string in a message. Longer ones are cut when written and refused when read.
inline constexpr std::size_t kMaxString = 2048;

// An enum on the wire. REQUIRES: `constexpr unsigned enum_count(E)` beside it returns the number of
// its values, which are 0 to count - 1.
template <class T>
concept WireEnum = std::is_enum_v<T>;

// Appends values to `out`. Numbers are held back; all are in `out` when the outermost call returns.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) {}

  template <class... Ts>
  void operator()(const Ts&... values) {
    ++depth_;
    (put(values), ...);
    if (--depth_ == 0) flush();
  }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      put(static_cast<std::uint8_t>(value ? 1 : 0));
    } else if constexpr (std::is_unsigned_v<T>) {
      std::array<std::uint8_t, sizeof(T)> bytes{};
      for (std::size_t i = 0; i < sizeof(T); ++i)
        bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
      hold(bytes);
    } else if constexpr (WireEnum<T>) {
      put(static_cast<std::uint8_t>(value));
    } else {
      T::fields(value, *this);
    }
  }
  template <class Kind>
  void put(const Bits128<Kind>& bits) {
    hold(bits.bytes);
  }
  void put(const std::string& text) {
    if (text.size() > kMaxString) return put(shortened(text, kMaxString));
    put(static_cast<std::uint32_t>(text.size()));
    flush();
    out_.insert(out_.end(), text.begin(), text.end());
  }
  template <class T>
  void put(const std::vector<T>& list) {
    put(static_cast<std::uint32_t>(list.size()));
    for (const T& item : list) put(item);
  }
  template <class... Ts>
  void put(const std::variant<Ts...>& choice) {
    put(static_cast<std::uint8_t>(choice.index()));
    std::visit([this](const auto& value) { put(value); }, choice);
  }

  template <std::size_t N>
  void hold(const std::array<std::uint8_t, N>& bytes) {
    static_assert(N <= kHeld);
    if (held_bytes_ + N > kHeld) flush();
    std::memcpy(held_.data() + held_bytes_, bytes.data(), N);
    held_bytes_ += N;
  }
  void flush() {
    out_.insert(out_.end(), held_.data(), held_.data() + held_bytes_);
    held_bytes_ = 0;
  }

  static constexpr std::size_t kHeld = 128;  // several numbers are appended at a time
  Bytes& out_;
  std::array<std::uint8_t, kHeld> held_;
  std::size_t held_bytes_ = 0;
  unsigned depth_ = 0;  // calls within calls
};

// The values on the wire.
template <class... Ts>
[[nodiscard]] Bytes encoded(const Ts&... values) {
  Bytes bytes;
  Writer writer(bytes);
  writer(values...);
  return bytes;
}

// Bounds-checked. After the first failure reads have no effect.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> in) : in_(in) {}

  template <class... Ts>
  void operator()(Ts&... values) {
    (get(values), ...);
  }

  // True when all reads succeeded and no bytes are left.
  [[nodiscard]] bool complete() const { return ok_ && at_ == in_.size(); }

 private:
  [[nodiscard]] std::size_t left() const { return in_.size() - at_; }
  bool need(std::size_t count) {
    if (left() < count) ok_ = false;
    return ok_;
  }

  template <class T>
  void get(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      std::uint8_t byte = 0;
      get(byte);
      if (byte > 1) ok_ = false;
      value = byte == 1;
    } else if constexpr (std::is_unsigned_v<T>) {
      if (!need(sizeof(T))) return;
      std::array<std::uint8_t, sizeof(T)> bytes{};
      std::memcpy(bytes.data(), in_.data() + at_, sizeof(T));
      T read = 0;
      for (std::size_t i = 0; i < sizeof(T); ++i)
        read = static_cast<T>(read | (static_cast<T>(bytes[i]) << (8 * i)));
      value = read;
      at_ += sizeof(T);
    } else if constexpr (WireEnum<T>) {
      std::uint8_t byte = 0;
      get(byte);
      if (byte >= enum_count(T{})) {
        ok_ = false;
      } else {
        value = static_cast<T>(byte);
      }
    } else {
      T::fields(value, *this);
    }
  }
  template <class Kind>
  void get(Bits128<Kind>& bits) {
    if (!need(bits.bytes.size())) return;
    std::memcpy(bits.bytes.data(), in_.data() + at_, bits.bytes.size());
    at_ += bits.bytes.size();
  }
  void get(std::string& text) {
    std::uint32_t size = 0;
    get(size);
    if (size > kMaxString) ok_ = false;
    if (!ok_ || !need(size)) return;
    text.assign(reinterpret_cast<const char*>(in_.data()) + at_, size);
    at_ += size;
  }
  template <class T>
  void get(std::vector<T>& list) {
    std::uint32_t count = 0;
    get(count);
    if (count > left()) ok_ = false;  // every item takes a byte or more
    list.clear();
    for (std::uint32_t i = 0; ok_ && i < count; ++i) {
      T item{};
      get(item);
      if (ok_) list.push_back(std::move(item));
    }
  }
  template <class... Ts>
  void get(std::variant<Ts...>& choice) {
    std::uint8_t index = 0;
    get(index);
    if (!ok_) return;
    if (index >= sizeof...(Ts)) {
      ok_ = false;
      return;
    }
    choose(choice, index, std::index_sequence_for<Ts...>{});
  }
  template <class... Ts, std::size_t... Is>
  void choose(std::variant<Ts...>& choice, std::size_t index, std::index_sequence<Is...>) {
    ((index == Is ? get(choice.template emplace<Is>()) : void()), ...);
  }

  std::span<const std::uint8_t> in_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace pccl::wire

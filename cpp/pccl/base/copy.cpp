#include "pccl/base/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pccl {

#if defined(__SSE2__)
namespace {

constexpr std::size_t kLine = 64;

// One cache line at a time; `store` writes 16 bytes.
template <class Store>
void copy_lines(std::uint8_t*& to, const std::uint8_t*& from, std::size_t& bytes, Store store) {
  for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    store(target, a);
    store(target + 1, b);
    store(target + 2, c);
    store(target + 3, d);
    asm volatile("" ::: "memory");  // otherwise the compiler calls memcpy
  }
}

}  // namespace

void copy(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  copy_lines(target, source, bytes,
             [](__m128i* at, __m128i value) { _mm_storeu_si128(at, value); });
  if (bytes > 0) std::memcpy(target, source, bytes);
}

void copy_past_cache(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine);
  if (head > 0) std::memcpy(target, source, head);
  target += head;
  source += head;
  bytes -= head;
  copy_lines(target, source, bytes,
             [](__m128i* at, __m128i value) { _mm_stream_si128(at, value); });
  _mm_sfence();
  if (bytes > 0) std::memcpy(target, source, bytes);
}
#else
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void copy_past_cache(void* to, const void* from, std::size_t bytes) { copy(to, from, bytes); }
#endif

}  // namespace pccl

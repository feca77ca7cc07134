#include "pccl/link/frame.h"

#include <xxhash.h>

#include <algorithm>

namespace pccl::link {
namespace {

constexpr std::size_t kCheckAt = kFrameHeaderBytes - sizeof(std::uint32_t);

std::uint32_t check_of(const std::uint8_t* header) {
  return static_cast<std::uint32_t>(XXH3_64bits(header, kCheckAt));
}

}  // namespace

std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header) {
  wire::Bytes bytes;
  bytes.reserve(kFrameHeaderBytes);
  wire::Writer writer(bytes);
  writer(header);
  std::array<std::uint8_t, kFrameHeaderBytes> out{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), out.size()), out.begin());
  const std::uint32_t check = check_of(out.data());
  for (std::size_t i = 0; i < sizeof check; ++i) {
    out[kCheckAt + i] = static_cast<std::uint8_t>(check >> (8 * i));
  }
  return out;
}

Result<FrameHeader> decode(std::span<const std::uint8_t, kFrameHeaderBytes> bytes) {
  FrameHeader header;
  wire::Reader reader(bytes);
  reader(header);
  if (header.magic != kFrameMagic)
    return {Code::unreachable, "these bytes are not pccl's link protocol"};
  if (header.version != wire::kProtocolVersion) {
    return {Code::refused,
            "link protocol version " + std::to_string(header.version) + " does not match"};
  }
  if (header.header_check != check_of(bytes.data())) {
    return {Code::unreachable, "a frame header was spoilt under way (its checksum is wrong)"};
  }
  if (!reader.complete()) return {Code::refused, "malformed frame header"};
  const std::uint32_t limit = carries_data(header.type) ? kMaxDataPayload : kMaxSmallPayload;
  if (header.payload_bytes > limit) {
    return {Code::refused,
            "a frame of " + std::to_string(header.payload_bytes) + " bytes is over the limit"};
  }
  return header;
}

}  // namespace pccl::link

#include "pccl/link/frame.h"

#include <algorithm>

namespace pccl::link {

std::array<std::uint8_t, kFrameHeaderBytes> encode(const FrameHeader& header) {
  wire::Bytes bytes;
  bytes.reserve(kFrameHeaderBytes);
  wire::Writer writer(bytes);
  writer(header);
  std::array<std::uint8_t, kFrameHeaderBytes> out{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), out.size()), out.begin());
  return out;
}

Result<FrameHeader> decode(std::span<const std::uint8_t, kFrameHeaderBytes> bytes) {
  FrameHeader header;
  wire::Reader reader(bytes);
  reader(header);
  if (header.magic != kFrameMagic)
    return {Code::refused, "these bytes are not pccl's link protocol"};
  if (header.version != wire::kProtocolVersion) {
    return {Code::refused,
            "link protocol version " + std::to_string(header.version) + " does not match"};
  }
  if (!reader.complete()) return {Code::refused, "malformed frame header"};
  const std::uint32_t limit = header.type == FrameType::data ? kMaxDataPayload : kMaxSmallPayload;
  if (header.payload_bytes > limit) {
    return {Code::refused,
            "a frame of " + std::to_string(header.payload_bytes) + " bytes is over the limit"};
  }
  return header;
}

}  // namespace pccl::link

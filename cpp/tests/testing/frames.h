// Frames for the tests of links.
#pragma once

#include <cstdint>

#include "pccl/link/stripe.h"

namespace pccl::tests {

// A data frame with a checksum. The payload is not copied.
inline link::OutgoingFrame data_frame(std::uint32_t segment, wire::Bytes& payload) {
  link::FrameHeader header{.type = link::FrameType::data,
                           .payload_bytes = static_cast<std::uint32_t>(payload.size()),
                           .segment = segment};
  link::OutgoingFrame frame;
  frame.payload = {{payload.data(), payload.size()}};
  frame.payload_bytes = header.payload_bytes;
  header.checksum = link::checksum(header, frame.payload);
  frame.header = link::encode(header);
  frame.token = 1;
  frame.trailer = true;
  return frame;
}

}  // namespace pccl::tests

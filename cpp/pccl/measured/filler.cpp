#include "pccl/measured/filler.h"

#include <vector>

namespace pccl::measured {

link::OutgoingFrame filler_frame(std::uint32_t bytes) {
  static const std::vector<std::uint8_t> zeros(kFillerBytes, 0);
  link::FrameHeader header;
  header.type = link::FrameType::probe;
  header.payload_bytes = bytes;
  link::OutgoingFrame frame;
  frame.header = link::encode(header);
  frame.payload = {link::vec(zeros.data(), bytes)};
  frame.payload_bytes = bytes;
  frame.trailer = true;
  return frame;
}

}  // namespace pccl::measured

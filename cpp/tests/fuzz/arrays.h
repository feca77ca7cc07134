// The shared state in manifest.cpp's scripts.
#pragma once

#include <memory>

#include "pccl/state/manifest.h"

namespace pccl::fuzz {

struct Arrays {
  wire::Bytes weights = wire::Bytes((1 << 20) + 3000, 7);  // two chunks
  wire::Bytes bias = wire::Bytes(16, 9);
  std::shared_ptr<state::LocalState> state;
  explicit Arrays(std::uint8_t filler) {
    weights.assign(weights.size(), filler);
    const auto entry = [](const char* name, wire::Bytes& bytes, bool loose) {
      state::LocalEntry local;
      local.what.name = name;
      local.what.kind = "uint8";
      local.what.shape = {bytes.size()};
      local.what.bytes = bytes.size();
      local.what.loose = loose;
      local.data = local.writable = bytes.data();
      return local;
    };
    Serial serial;
    state = *state::hash({entry("bias", bias, true), entry("weights", weights, false)}, serial, {});
  }
};

}  // namespace pccl::fuzz

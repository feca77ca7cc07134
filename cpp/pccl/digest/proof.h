// That one knows a word, shown without telling it: SipHash-2-4 with a result of 128 bits, the word
// being its key.
#pragma once

#include <cstdint>
#include <span>

#include "pccl/base/ids.h"

namespace pccl::digest {

// Only who knows `word` can make it, or tell whether another did.
[[nodiscard]] PeerId proof(const PeerId& word, std::span<const std::uint64_t> about);

}  // namespace pccl::digest

// Facts about this process and its host.
#pragma once

#include <string>

namespace pccl::os {

// The environment: "NAME=value" strings, ended by a null pointer. A shared library reaches it by
// another way on macOS. REQUIRES: no other thread changes the environment meanwhile.
[[nodiscard]] char** environment();

// Processors that this process may use. 0: not known. A waiting rank yields its core sooner when
// there are more ranks than processors. *any thread*
[[nodiscard]] unsigned usable_processors();

// A text that changes whenever the host starts, and that all its processes read alike: equal texts
// mean equal steady clocks. Empty: not known. *any thread*
[[nodiscard]] std::string boot_id();

}  // namespace pccl::os

// The OpenSSL that this library uses: the system's, or in a wheel a copy of its own.
#pragma once

#include <string>

namespace pccl::io {

struct OpenSsl {
  std::string version;   // such as "OpenSSL 3.0.19 27 Jan 2026"; of the library, not of its headers
  bool bundled = false;  // linked into this library
};

[[nodiscard]] OpenSsl openssl();

// Keeps OpenSSL from cleaning up in exit(), when threads of this library may still run, and a
// bundled one from reading the system's openssl.cnf: it may name modules that only fit the system's
// OpenSSL. Does nothing if OpenSSL has been used already. Any thread, any number of times.
void prepare_openssl();

}  // namespace pccl::io

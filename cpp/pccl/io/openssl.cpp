#include "pccl/io/openssl.h"

#include <openssl/crypto.h>

namespace pccl::io {

#ifdef PCCL_OPENSSL_BUNDLED

OpenSsl openssl() { return {OpenSSL_version(OPENSSL_VERSION), true}; }

void prepare_openssl() {
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_NO_LOAD_CONFIG, nullptr);
}

#else

OpenSsl openssl() { return {OpenSSL_version(OPENSSL_VERSION), false}; }

void prepare_openssl() { OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr); }

#endif

}  // namespace pccl::io

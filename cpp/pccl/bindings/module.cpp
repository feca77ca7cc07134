// pccl._core: the native engine. Its contract is pccl/_core.pyi.
#include <cstdlib>

#include "pccl/base/log.h"
#include "pccl/bindings/common.h"
#include "pccl/io/address.h"
#include "pccl/io/congestion.h"
#include "pccl/io/openssl.h"

NB_MODULE(_core, m) {
#ifdef NDEBUG
  // A program that ends by an exception, as by Drained, keeps the frames that hold our objects.
  // nanobind would tell its users of leaks.
  nb::set_leak_warnings(false);
#endif
  // Python knows whether the descriptor was closed when it began.
  if (nb::module_::import_("sys").attr("__stderr__").is_none()) pccl::disown_stderr();
  pccl::io::prepare_openssl();
  m.attr("__version__") = PCCL_VERSION;
  m.def("openssl", [] {
    const pccl::io::OpenSsl used = pccl::io::openssl();
    return nb::make_tuple(used.version, used.bundled);
  });
  m.def("interface_addresses", &pccl::io::interface_addresses);
  m.def("long_path_congestion", [] {
    const auto chosen = pccl::io::Congestion::make({});
    return chosen ? chosen->name() : std::string();
  });
  m.def(
      "is_set",
      [](const char* variable) {
        const char* value = std::getenv(variable);
        return value != nullptr && *value != '\0';
      },
      "variable"_a);
  pccl::bindings::bind_arrays(m);
  pccl::bindings::bind_operation(m);
  pccl::bindings::bind_reducer(m);
  pccl::bindings::bind_secret(m);
  pccl::bindings::bind_communicator(m);
  pccl::bindings::bind_master(m);
  pccl::bindings::bind_weighted(m);
  pccl::bindings::bind_xla(m);
  pccl::bindings::bind_doctor(m);
  pccl::bindings::bind_status(m);
}

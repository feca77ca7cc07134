// pccl._core: the native engine. Its contract is pccl/_core.pyi.
#include "pccl/bindings/common.h"

NB_MODULE(_core, m) {
  m.attr("__version__") = PCCL_VERSION;
  pccl::bindings::bind_operation(m);
  pccl::bindings::bind_communicator(m);
  pccl::bindings::bind_master(m);
}

// pccl._testing: inner parts of the engine that tests drive directly. Not for users.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_reduce(nb::module_& m);
void bind_schedule(nb::module_& m);

NB_MODULE(_testing, m) {
  bind_reduce(m);
  bind_schedule(m);
}

// pccl._testing: internal parts of the engine, for tests only.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_buffer(nb::module_& m);
void bind_codec(nb::module_& m);
void bind_decisions(nb::module_& m);
void bind_election(nb::module_& m);
void bind_hostile(nb::module_& m);
void bind_log(nb::module_& m);
void bind_loop(nb::module_& m);
void bind_many_members(nb::module_& m);
void bind_control_connection(nb::module_& m);
void bind_missing_link(nb::module_& m);
void bind_neighbours(nb::module_& m);
void bind_prober(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_reduce(nb::module_& m);
void bind_relay(nb::module_& m);
void bind_schedule(nb::module_& m);
void bind_silent_link(nb::module_& m);
void bind_simulation(nb::module_& m);
void bind_stand_in(nb::module_& m);
void bind_topology(nb::module_& m);
void bind_transfer(nb::module_& m);
void bind_workers(nb::module_& m);

NB_MODULE(_testing, m) {
  bind_buffer(m);
  bind_codec(m);
  bind_decisions(m);
  bind_election(m);
  bind_hostile(m);
  bind_log(m);
  bind_loop(m);
  bind_many_members(m);
  bind_control_connection(m);
  bind_missing_link(m);
  bind_neighbours(m);
  bind_prober(m);
  bind_quantize(m);
  bind_reduce(m);
  bind_relay(m);
  bind_schedule(m);
  bind_silent_link(m);
  bind_simulation(m);
  bind_stand_in(m);
  bind_topology(m);
  bind_transfer(m);
  bind_workers(m);
}

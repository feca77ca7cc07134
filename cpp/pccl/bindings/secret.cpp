#include "pccl/net/secret.h"

#include <string>
#include <string_view>

#include "pccl/bindings/common.h"

namespace pccl::bindings {
namespace {

net::Secret checked(Result<net::Secret> made, const std::string& function) {
  if (!made) raise(made.error(), CallKind::collective, function.c_str());
  return std::move(*made);
}

}  // namespace

// Python holds it without seeing it: there is nothing to print or to pickle.
void bind_secret(nb::module_& m) {
  nb::class_<net::Secret>(m, "Secret")
      .def_static(
          "of",
          [](const nb::bytes& bytes, const std::string& function) {
            return checked(net::Secret::from({bytes.c_str(), bytes.size()}, "the secret"),
                           function);
          },
          "bytes"_a, "function"_a)
      .def_static(
          "from_file",
          [](const std::string& path, const std::string& function) {
            return checked(net::Secret::from_file(path, "the secret"), function);
          },
          "path"_a, "function"_a)
      .def_static(
          "from_environment",
          [](const std::string& function) -> std::optional<net::Secret> {
            net::Secret secret = checked(net::Secret::from_environment(), function);
            if (!secret) return std::nullopt;
            return secret;
          },
          "function"_a);
}

}  // namespace pccl::bindings

#include "pccl/io/secret.h"

#include <string>
#include <string_view>

#include "pccl/bindings/common.h"

namespace pccl::bindings {
namespace {

io::Secret checked(Result<io::Secret> made, const std::string& function) {
  if (!made) raise(made.error(), CallKind::collective, function.c_str());
  return std::move(*made);
}

}  // namespace

// Python holds it without seeing it: there is nothing to print or to pickle.
void bind_secret(nb::module_& m) {
  nb::class_<io::Secret>(m, "Secret")
      .def_static(
          "of",
          [](const nb::bytes& bytes, const std::string& function) {
            return checked(io::Secret::from({bytes.c_str(), bytes.size()}, "the secret"), function);
          },
          "bytes"_a, "function"_a)
      .def_static(
          "from_file",
          [](const std::string& path, const std::string& function) {
            return checked(io::Secret::from_file(path, "the secret"), function);
          },
          "path"_a, "function"_a)
      .def_static(
          "from_environment",
          [](const std::string& function) -> std::optional<io::Secret> {
            io::Secret secret = checked(io::Secret::from_environment(), function);
            if (!secret) return std::nullopt;
            return secret;
          },
          "function"_a);
}

}  // namespace pccl::bindings

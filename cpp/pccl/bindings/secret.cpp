#include "pccl/io/secret.h"

#include <string>

#include "pccl/bindings/common.h"

namespace pccl::bindings {
// Python cannot see inside a secret: there is nothing to print or to pickle.
void bind_secret(nb::module_& m) {
  nb::class_<io::Secret>(m, "Secret")
      .def_static(
          "of",
          [](const nb::bytes& bytes, const std::string& function) {
            return value_of(io::Secret::from({bytes.c_str(), bytes.size()}, "the secret"),
                            CallKind::collective, function.c_str());
          },
          "bytes"_a, "function"_a)
      .def_static(
          "from_file",
          [](const std::string& path, const std::string& function) {
            return value_of(io::Secret::from_file(path, "the secret"), CallKind::collective,
                            function.c_str());
          },
          "path"_a, "function"_a)
      .def_static(
          "from_environment",
          [](const std::string& function) -> std::optional<io::Secret> {
            io::Secret secret =
                value_of(io::Secret::from_environment(), CallKind::collective, function.c_str());
            if (!secret) return std::nullopt;
            return secret;
          },
          "function"_a)
      // Bytes, so that Python compares them in constant time.
      .def("status_key", [](const io::Secret& secret) {
        const io::Key key = secret.status_key();
        return nb::bytes(key.bytes.data(), key.bytes.size());
      });
}

}  // namespace pccl::bindings

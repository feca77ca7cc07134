#!/usr/bin/env bash
# check_macos.sh PYTHON [all|arm64]: compiles the rooms that call the system for macOS on arm64 and
# for FreeBSD on x86-64, with the toolchain of the package ziglang. tools/check_rooms.py keeps the
# headers of one system out of all rooms but os. With "all" this compiles every room for macOS on
# arm64 and x86-64, links the C library, and compiles the Python extension; with "arm64" not for
# x86-64, which takes two minutes more. Nothing of it can run here. OpenSSL for these systems is not
# at hand: its headers are this system's, and the linker leaves its functions open.
set -euo pipefail
python=$1
callers=(pccl_os pccl_base pccl_memory pccl_io pccl_node pccl_server) # of the system
if [ "${2:-}" = all ]; then
  systems=(aarch64-macos x86_64-macos x86_64-freebsd)
else
  systems=(aarch64-macos x86_64-freebsd)
fi
cd "$(dirname "$0")/.."
"$python" -m pip install -q -c tools/wheel/requirements.txt ziglang # 100 MB, for this check alone
root=$PWD
build=build/check-macos
export ZIG_GLOBAL_CACHE_DIR=$root/build/zig ZIG_LOCAL_CACHE_DIR=$root/build/zig

# Headers that do not depend on the system, apart from those of Linux's C library.
include=$root/$build/include
mkdir -p "$include"
header() { echo "#include <$1>" | c++ -E -x c++ - | sed -n "s,^# [0-9]* \"\\(.*/$1\\)\".*,\\1,p" | head -n 1; }
asio=$(header asio.hpp)
ln -sfn "$asio" "$include/asio.hpp"
ln -sfn "${asio%.hpp}" "$include/asio"
ln -sfn "$(header xxhash.h)" "$include/xxhash.h"
mkdir -p "$include/openssl"
for name in ssl.h opensslconf.h configuration.h; do  # Debian keeps some apart, by architecture
  found=$(header openssl/$name)
  if [ -n "$found" ]; then ln -sf "${found%/*}"/*.h "$include/openssl/"; fi
done

for system in "${systems[@]}"; do
  rooms=("${callers[@]}")
  if [ -n "${2:-}" ] && [ "${system#*-}" = macos ]; then
    rooms=()
  fi
  tools=$root/$build/$system/tools
  mkdir -p "$tools"
  for tool in ar ranlib; do
    printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$python" "$tool" >"$tools/$tool"
  done
  # One capture is used for some types only; files compiled as one shadow each other's names.
  # Linked without a C++ library: zig would compile its own first, which takes a minute.
  cat >"$tools/c++" <<END
#!/bin/sh
case " \$* " in
*" -c "*) exec "$python" -m ziglang c++ -target $system "\$@" -Wno-unused-lambda-capture -Wno-shadow ;;
*) exec "$python" -m ziglang c++ -target $system -nostdlib++ -Wl,-undefined,dynamic_lookup "\$@" ;;
esac
END
  chmod +x "$tools"/*
  printf '!<arch>\n' >"$tools/empty.a"
  # Optimisation would take time, and shows nothing more.
  cmake -S . -B "$build/$system" -G Ninja --log-level=WARNING \
    -DCMAKE_TOOLCHAIN_FILE="$root/tools/macos/toolchain.cmake" \
    -DPCCL_ZIG_TARGET="$system" -DPCCL_ZIG_TOOLS="$tools" \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O0 -fno-sanitize=all" \
    -DPCCL_PYTHON=OFF -DPCCL_UNITY=ON -DPCCL_WERROR=ON -DCMAKE_OPTIMIZE_DEPENDENCIES=ON \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
    -DPCCL_ASIO_INCLUDE_DIR="$include" -DPCCL_XXHASH_INCLUDE_DIR="$include" \
    -DOPENSSL_INCLUDE_DIR="$include" -DOPENSSL_VERSION=3.0.0 \
    -DOPENSSL_SSL_LIBRARY="$tools/empty.a" -DOPENSSL_CRYPTO_LIBRARY="$tools/empty.a" >/dev/null
  "$python" tools/macos/compile_at_once.py "$build/$system" "$tools/c++" "${rooms[@]}"
  if [ ${#rooms[@]} -gt 0 ]; then
    echo "$system: compiled ${rooms[*]}"
  else
    echo "$system: compiled all rooms, and linked the C library"
    # By hand: CMake looks for a Python of the target. The headers are those of this Python, whose
    # types have the same sizes there. Debian keeps one of them apart, by architecture.
    nanobind_headers=$("$python" -m nanobind --include_dir)
    python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    mkdir -p "$include/python"
    ln -sfn "$python_headers"/* "$include/python/"
    for own in /usr/include/*-linux-gnu/"${python_headers##*/}"/pyconfig.h; do
      if grep -q multiarch "$python_headers/pyconfig.h"; then ln -sf "$own" "$include/python/"; fi
    done
    # In one unit, but for the two that CMake compiles alone, too.
    alone=(plain.cpp reducer.cpp)
    (cd cpp/pccl/bindings && ls -- *.cpp) | grep -vxF "$(printf '%s\n' "${alone[@]}")" |
      sed 's,.*,#include "pccl/bindings/&",' >"$build/$system/bindings.cpp"
    printf '%s\n' "$build/$system/bindings.cpp" "${alone[@]/#/cpp/pccl/bindings/}" |
      xargs -P 2 -I {} sh -c '"$@" -o "$0/$(basename "{}").o" -c "{}"' "$build/$system" \
      "$tools/c++" -std=c++20 -O0 -fno-sanitize=all \
      -Wall -Wextra -Wpedantic -Wconversion -Werror \
      -Icpp -isystem "$include" -isystem "$include/python" -isystem "$nanobind_headers" \
      -DASIO_STANDALONE -DASIO_NO_DEPRECATED -DASIO_DISABLE_STD_ALIGNED_ALLOC -DXXH_INLINE_ALL \
      -DNB_BACKEND_MODULE=nanobind_backend -DNB_BACKEND_PYPI=nanobind-backend \
      -DPy_LIMITED_API=0x030a0000 -DPCCL_VERSION='"0"'
    echo "$system: compiled the Python extension"
  fi
done

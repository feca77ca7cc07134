#!/usr/bin/env bash
# setup.sh VENV [dev|bench|fuzz]: makes this machine able to build pccl. Installs system packages
# (apt; sudo when not root) only when something is missing, makes the virtual environment, and with
# "dev" fills it with requirements-dev.txt. "bench" also wants what pccl is measured against, "fuzz"
# a clang that has libFuzzer. PYTHON chooses the interpreter; otherwise the first of python3,
# python3.14 ... python3.10 that is new enough.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
kind=${2:-}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
  if new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "setup: no Python 3.10 or newer found (set PYTHON=...)" >&2
  exit 1
fi

# Asked by capability and not by package name, so that hand-installed tools count.
have() { command -v "$1" >/dev/null; }
header() { echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1 || [ -f "/usr/include/$1" ]; }
missing=()
have c++ && have make || missing+=(build-essential)
have cmake || missing+=(cmake)
have ninja || missing+=(ninja-build)
[ "$kind" != dev ] || have pkg-config || missing+=(pkg-config)
[ "$kind" != dev ] || have ip || missing+=(iproute2)
[ "$kind" != dev ] || have nft || [ -x /usr/sbin/nft ] || missing+=(nftables)
[ "$kind" != fuzz ] || [ -n "$(tools/find_fuzzer.sh)" ] || missing+=(clang)
header openssl/ssl.h || missing+=(libssl-dev)
header asio.hpp || missing+=(libasio-dev)
header xxhash.h || missing+=(libxxhash-dev)
# Debian splits both of these from the interpreter; a Python from elsewhere has them.
package=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$package-venv")
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  missing+=("$package-dev")
if [ "$kind" = bench ]; then
  have mpirun || missing+=(openmpi-bin)
  have iperf3 || missing+=(iperf3)
fi

if [ ${#missing[@]} -gt 0 ]; then
  sudo=
  [ "$(id -u)" -eq 0 ] || sudo=sudo
  if ! have apt-get || { [ -n "$sudo" ] && ! have sudo; }; then
    echo "setup: missing: ${missing[*]} (as root on Debian or Ubuntu: apt-get install ${missing[*]})" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  $sudo apt-get update -qq
  # The least clang that will do, and its run-times where they are a package of their own.
  if [[ " ${missing[*]} " == *" clang "* ]]; then
    for version in {16..25}; do
      apt-cache show "clang-$version" >/dev/null 2>&1 || continue
      missing=("${missing[@]/#clang/clang-$version}")
      if apt-cache show "libclang-rt-$version-dev" >/dev/null 2>&1; then missing+=("libclang-rt-$version-dev"); fi
      break
    done
  fi
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

# In CI also what some tests use and skip without: a browser (Ubuntu's is a snap, and is not taken),
# Prometheus, a server for ssh and SLURM. On other machines they would leave a service or hundreds
# of MB behind.
if [ "$kind" = dev ] && [ -n "${CI:-}" ] && [ "$(id -u)" -eq 0 ] && have apt-get; then
  extra=()
  have chromium || have google-chrome || extra+=(chromium)
  have prometheus || extra+=(prometheus)
  [ -x /usr/sbin/sshd ] || extra+=(openssh-server)
  [ -x /usr/sbin/slurmctld ] || extra+=(slurmctld slurmd slurm-client)
  if [ ${#extra[@]} -gt 0 ]; then
    apt-get update -qq
    for package in "${extra[@]}"; do
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" ||
        echo "setup: no $package here; its tests are skipped"
    done
  fi
fi

if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
fi
if [ "$kind" = dev ] && ! cmp -s requirements-dev.txt "$venv/requirements-dev.installed"; then
  "$venv/bin/python" -m pip install -q -r requirements-dev.txt
  cp requirements-dev.txt "$venv/requirements-dev.installed"
fi

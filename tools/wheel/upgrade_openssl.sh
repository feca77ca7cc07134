#!/usr/bin/env bash
# upgrade_openssl.sh: installs the newest OpenSSL that the system offers, since a release's wheel
# contains it. Debian and Ubuntu; elsewhere it says what to do.
set -euo pipefail
if ! command -v apt-get >/dev/null; then
  echo "release: make sure yourself that OpenSSL is the system's newest" >&2
  exit 0
fi
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libssl-dev
dpkg-query -W libssl-dev

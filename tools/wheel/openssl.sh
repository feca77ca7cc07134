#!/usr/bin/env bash
# openssl.sh DIR: fetches the OpenSSL that a release's wheel contains into DIR: the static libraries
# of Debian's stable release, with the libraries that they need. `versions` names the packages.
#
# This machine's own may be older. OpenSSL 3.0 does not use the wide AES instructions (VAES) of
# today's processors: AES-GCM reaches 6 GB/s where 3.5 reaches 16 GB/s. Needs apt and Debian's keys,
# no root, and changes nothing else.
set -euo pipefail
suite=trixie
packages=(libssl-dev libzstd-dev zlib1g-dev)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for need in "$(command -v apt-get || true)" "$(command -v dpkg-deb || true)" "$keys"; do
  if [ ! -e "$need" ]; then
    echo "openssl.sh: needs apt-get, dpkg-deb and the package debian-archive-keyring" >&2
    exit 1
  fi
done
dir=$(realpath -m "$1")
rm -rf "$dir"
mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/root" "$dir/packages"
for from in "debian $suite" "debian $suite-updates" "debian-security $suite-security"; do
  echo "deb [arch=amd64 signed-by=$keys] http://deb.debian.org/$from main"
done >"$dir/sources.list"
# Packages and preferences of this machine do not count. A list that does not come, or has no valid
# signature, is an error: it may be the one with the security fixes.
options=(-qq
  -o Dir::State::status=/dev/null -o Dir::State::lists="$dir/lists" -o Dir::Cache="$dir/cache"
  -o Dir::Etc::sourcelist="$dir/sources.list" -o Dir::Etc::sourceparts="$dir/root"
  -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts="$dir/root"  # empty
  -o APT::Update::Error-Mode=any -o Acquire::AllowInsecureRepositories=false
  -o APT::Get::AllowUnauthenticated=false -o Debug::NoLocking=1)
apt-get "${options[@]}" update
(cd "$dir/packages" && apt-get "${options[@]}" download "${packages[@]}" 2>&1 |
  { grep -v 'performed unsandboxed' || true; })
for package in "$dir"/packages/*.deb; do
  dpkg-deb -x "$package" "$dir/root"
  dpkg-deb -f "$package" Package Version | sed -n 's/^Package: //;N;s/\n *Version: */ /p'
done >"$dir/versions.new"
if [ "$(wc -l <"$dir/versions.new")" -ne ${#packages[@]} ]; then
  echo "openssl.sh: not all of ${packages[*]} have come" >&2
  exit 1
fi
mv "$dir/versions.new" "$dir/versions"  # the last step: without it the next build fetches again
cat "$dir/versions"

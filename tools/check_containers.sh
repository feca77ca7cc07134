#!/usr/bin/env bash
# check_containers.sh [DIST]: builds the images of deploy/Containerfile from the wheel in DIST
# (dist/), with the commands of docs/guide/master-service.md. Then a master and two peers reduce in
# three containers. One peer is killed: the other goes on, and receives it again as a newcomer.
#
# Needs root and podman; without them it says so and does nothing. All containers are in a network
# namespace made for the check, and images and mounts vanish with it. The base image is that of the
# Containerfile, or PCCL_BASE with Python 3.13, where podman can pull it. Otherwise a Debian made by
# debootstrap, kept in build/containers for the next time.
set -euo pipefail
dist=$(realpath "${1:-dist}")
cd "$(dirname "$0")/.."
skip() { echo "check-containers: skipped, $*"; exit 0; }
[ "$(id -u)" -eq 0 ] || skip "needs root (network namespaces)"
for tool in podman unshare ip; do
  command -v $tool >/dev/null || skip "needs $tool"
done
python=$PWD/build/release/bin/python
wheel=$(find "$dist" -name "*_$(uname -m).whl" 2>/dev/null || true)
if [ ! -x "$python" ] || [ ! -f "$wheel" ]; then
  echo "check-containers: needs one wheel of this processor in $dist; run make package first" >&2
  exit 1
fi
kept=$PWD/build/containers
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$kept"

# --- The base image, and the wheels that the peer's image installs: the last uses of the network.

base=${PCCL_BASE:-$(sed -n 's/^ARG BASE=//p' deploy/Containerfile)}
podman=(podman --root "$work/images" --runroot "$work/run" --storage-driver vfs)

debian() {
  debootstrap --variant=minbase --include=python3,python3-pip trixie "$work/root" >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2; return 1; }
  # As in the image of the Containerfile: "python", and a pip that may install for all.
  ln -s python3 "$work/root/usr/bin/python"
  rm "$work"/root/usr/lib/python3*/EXTERNALLY-MANAGED
  tar -C "$work/root" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' -cf "$kept/base.part" .
  mv "$kept/base.part" "$kept/base.tar"
  rm -rf "$work/root"
}
if ! timeout 120 "${podman[@]}" pull -q "$base" >/dev/null 2>"$work/log"; then
  echo "check-containers: cannot pull $base; using a Debian with Python instead"
  if [ ! -f "$kept/base.tar" ]; then
    command -v debootstrap >/dev/null || skip "and there is no debootstrap"
    export -f debian
    export work kept
    tools/stage.sh "base image from Debian" bash -euc debian
  fi
  base=localhost/pccl-base
  "${podman[@]}" import -q "$kept/base.tar" $base >/dev/null
fi
mkdir "$work/wheels" "$work/context"
cp "$wheel" "$work/context"
# dist/ may hold the wheel for the other processor, too.
touch "$work/context/pccl_collectives-0-cp310-abi3-manylinux_2_28_other.whl"
"$python" -m pip download -q --dest "$work/wheels" --only-binary=:all: --implementation cp \
  --python-version 3.13 "$wheel"
printf '[install]\nno-index = true\nfind-links = /wheels\n' >"$work/pip.conf"

# --- The images and the run, in a network of its own.

export base work
tools/stage.sh "images and containers" unshare --mount --net tools/containers/run.sh

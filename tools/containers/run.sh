#!/usr/bin/env bash
# run.sh: the part of check_containers.sh in a network namespace of its own. Builds the images from
# $base and the files in $work, then runs the containers.
set -euo pipefail
ip link set lo up
podman=(podman --root "$work/images" --runroot "$work/run" --storage-driver vfs)
# The check may not raise limits, so each container has the limits of this shell.
limits=(--ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit "nproc=4096:4096")
fail() { echo "check-containers: $*" >&2; exit 1; }

# crun refuses machines with control groups of both versions, and runc takes them.
if ! said=$("${podman[@]}" run --rm "${limits[@]}" "$base" true 2>&1); then
  podman+=(--runtime runc)
  "${podman[@]}" run --rm "${limits[@]}" "$base" true || fail "podman starts no container here: $said"
  echo "with runc: $said"
fi
trap '"${podman[@]}" rm --all --force --time 2 >/dev/null 2>&1' EXIT

for target in master peer; do
  "${podman[@]}" build -q --format docker -f deploy/Containerfile --target $target -t pccl-$target \
    --build-arg BASE="$base" --network none --volume "$work/pip.conf:/etc/pip.conf:ro" \
    --volume "$work/wheels:/wheels:ro" "${limits[@]}" "$work/context" >/dev/null
done

# Podman complains where there is no systemd, which would start health checks.
start() {
  local said
  said=$("${podman[@]}" run -d --name "$1" "${limits[@]}" -v "$work/secret:/run/secrets/pccl:ro" "${@:2}" 2>&1) ||
    fail "$1 does not start: $said"
}
# Waits until the container has printed a line that is $2.
says() {
  grep -E -q -m 1 -x "$2" < <(timeout 60 "${podman[@]}" logs --follow "$1" 2>&1) ||
    fail "$1 did not say: $2: $("${podman[@]}" logs "$1" 2>&1)"
}
ends() {
  local status
  status=$(timeout 60 "${podman[@]}" wait "$1") || fail "$1 did not end"
  [ "$status" = 0 ] || fail "$1 ended with status $status: $("${podman[@]}" logs "$1" 2>&1)"
}

"${podman[@]}" run --rm "${limits[@]}" pccl-peer pccl secret >"$work/secret"
chmod 0400 "$work/secret"
chown 48148 "$work/secret"
start master --health-interval disable pccl-master
says master '.*listening on .*'
"${podman[@]}" healthcheck run master || fail "the master is not healthy"
address=$("${podman[@]}" inspect --format '{{.NetworkSettings.IPAddress}}' master)
peer=(-v "$PWD/tools/containers/peer.py:/peer.py:ro" pccl-peer)

start doctor -e "PCCL_MASTER=$address:48148" "${peer[@]}"
ends doctor
"${podman[@]}" logs doctor 2>&1 | grep -F Podman

# Two peers, of which one is killed and comes back. $1 is what both say of the loopback interface,
# the other arguments are options of podman.
reduce() {
  local name digests loopback=$1
  shift
  start one "$@" "${peer[@]}" python /peer.py
  start two "$@" "${peer[@]}" python /peer.py
  says one together
  "${podman[@]}" kill --signal KILL two >/dev/null
  says one alone
  "${podman[@]}" start two >/dev/null
  says one 'together again'
  for name in one two; do ends $name; done
  digests=$(for name in one two; do "${podman[@]}" logs $name 2>/dev/null | grep '^digest'; done | uniq -c)
  [[ "$digests" = *2\ digest* ]] || fail "the states differ: $digests"
  for name in one two; do says $name "$loopback"; done
  "${podman[@]}" rm one two >/dev/null
}
reduce 'not over the loopback interface' -e "PCCL_MASTER=$address:48148"
echo "passed: a master and two peers, each in a network of its own"
shared=(--network container:master -e PCCL_MASTER=127.0.0.1:48148)
reduce 'over the loopback interface' "${shared[@]}" -e PCCL_SHM=0
reduce 'not over the loopback interface' "${shared[@]}"
echo "passed: the same in one network, through shared memory"
"${podman[@]}" stop --time 20 master >/dev/null 2>&1
ends master

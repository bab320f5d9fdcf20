#!/usr/bin/env bash
# Builds the Dockerfile as it stands, without a container engine and without a registry, and runs the image: as its user, with a
# read-only root file system, on both stores, with its health check, until SIGTERM. The base images are made with debootstrap and
# stand in for those that the Dockerfile names; of Rust it is this machine's.
#
# It takes some minutes, so tests/all.sh does not run it. It needs root, Debian, and: buildah crun debootstrap postgresql curl python3.
# What it builds stays in target/image, so that the next run is quicker; `rm -rf target/image` begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=""
for program in buildah crun debootstrap curl python3 cargo; do
  command -v "$program" >/dev/null || missing="$missing $program"
done
pgbin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)
[ -n "$pgbin" ] || missing="$missing postgresql"
if [ -n "$missing" ] || [ "$(id -u)" != 0 ]; then
  echo "needs root and:$missing" >&2
  exit 1
fi

work=$PWD/target/image
mkdir -p "$work"
say() { printf '== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
store=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
buildah() { command buildah "${store[@]}" "$@"; }

# An image of a Debian with these packages. $1: its name, $2: packages, the rest: options of `buildah config`.
base() {
  local name=$1 packages=$2 root
  shift 2
  if buildah inspect "$name" >/dev/null 2>&1; then return; fi
  say "making $name"
  root=$work/base
  rm -rf "$root"
  debootstrap --variant=minbase ${packages:+--include="$packages"} bookworm "$root" http://deb.debian.org/debian >"$work/debootstrap.log"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$root" / >/dev/null
  buildah config --cmd bash "$@" "$container"
  buildah commit --quiet --rm "$container" "$name" >/dev/null
  rm -rf "$root"
}

named() { sed -n "s/^ARG $1=//p" Dockerfile; }
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
base "$(named DEBIAN_IMAGE)" ""
base "$(named RUST_IMAGE)" ca-certificates,gcc,libc6-dev \
  --env PATH=/opt/rust/bin:$path --env CARGO_HOME=/usr/local/cargo --env CARGO_NET_OFFLINE=true

# Crates are downloaded here, so that the build needs no network.
cargo fetch --quiet --locked
mkdir -p "$work/cargo"
cp -a --update "${CARGO_HOME:-$HOME/.cargo}/registry" "$work/cargo/"
say "building the image"
nice -n 10 buildah "${store[@]}" bud --isolation chroot --pull=never --format docker \
  --volume "$(rustc --print sysroot):/opt/rust:ro" --volume "$work/cargo:/usr/local/cargo" \
  --build-arg VERSION=test --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo none)" \
  --tag oncegate:test . >"$work/build.log" 2>&1 || { tail -20 "$work/build.log"; fail "the image cannot be built"; }
[ "${1:-}" = build ] && exit 0

# As tests/all.sh makes it.
if ! cmp -s tests/requirements.txt target/python/requirements.txt; then
  rm -rf target/python
  python3 -m venv target/python
  target/python/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
  cp tests/requirements.txt target/python/requirements.txt
fi
exec unshare --net --mount -- target/python/bin/python tests/image.py "$work" "$pgbin"

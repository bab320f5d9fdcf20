#!/bin/sh
# Everything that a change must pass, in one command: format, lints, and all tests on both stores.
# The tests start PostgreSQL servers of their own; it is installed where it is missing.
set -eu
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# Debian keeps initdb out of the PATH.
have_postgres() {
    command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        echo "needs root for: $*" >&2
        return 1
    fi
}

if ! have_postgres; then
    say "installing PostgreSQL"
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "initdb is missing and there is no apt-get: install PostgreSQL (the server) and run this again" >&2
        exit 1
    fi
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends postgresql >/dev/null
fi

say "cargo fmt --check"
cargo fmt --check
say "cargo clippy"
cargo clippy --locked --all-targets -- -D warnings
# The lines above and the tests build the program with its fault points; this is what is shipped.
say "cargo clippy, as it is shipped"
cargo clippy --locked -- -D warnings
say "cargo test"
cargo test --locked
say "all passed"

#!/bin/sh
# Everything that a change must pass, in one command: format, lints, and all tests on both stores.
# The tests start PostgreSQL servers, poolers and message brokers of their own, and gateways with wrong clocks; what they
# need of that is installed where it is missing.
set -eu
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# Debian keeps initdb out of the PATH.
have_postgres() {
    command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

# Nor may users find what administrators start.
have_pgbouncer() {
    command -v pgbouncer >/dev/null 2>&1 || [ -x /usr/sbin/pgbouncer ]
}

have_faketime() {
    ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1
}

have_nats() {
    command -v nats-server >/dev/null 2>&1 || [ -x /usr/sbin/nats-server ]
}

have_redis() {
    command -v redis-server >/dev/null 2>&1
}

# Debian keeps what makes a venv apart from Python.
have_venv() {
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1
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

missing=""
have_postgres || missing="$missing postgresql"
have_pgbouncer || missing="$missing pgbouncer"
have_faketime || missing="$missing faketime"
have_nats || missing="$missing nats-server"
have_redis || missing="$missing redis-server"
have_venv || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    say "installing$missing"
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "there is no apt-get: install$missing (PostgreSQL with its server) and run this again" >&2
        exit 1
    fi
    as_root apt-get update -qq
    # shellcheck disable=SC2086 # one word for each package
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

# The libraries that consumers verify deliveries with, and websockets, in the versions that are pinned; made anew when these change.
if ! cmp -s tests/requirements.txt target/python/requirements.txt; then
    say "installing what the Python scripts of the tests need into target/python"
    rm -rf target/python
    python3 -m venv target/python
    target/python/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt target/python/requirements.txt
fi

say "cargo fmt --check"
cargo fmt --check
say "cargo clippy"
cargo clippy --locked --all-targets -- -D warnings
# The lines above and the tests build the program with its fault points; this is what is shipped.
say "cargo clippy, as it is shipped"
cargo clippy --locked -- -D warnings
# Links between the docs, and what the lints of rustdoc find.
say "cargo doc"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --document-private-items --quiet
say "cargo test"
# Most tests wait for processes and disks most of their time: one more at a time than two cores have.
RUST_TEST_THREADS=${RUST_TEST_THREADS:-3} cargo test --locked
say "all passed"

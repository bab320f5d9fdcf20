#!/usr/bin/env bash
# First requests and replays per second through the gateway, on both stores, beside two yardsticks measured in the same
# run: pgbench doing the same two transactions, and nginx as a plain proxy. Read the ratios; the figures themselves are the
# machine's. Everything runs on this machine: load, API, gateway and database share its cores.
#
# Usage: benches/throughput.sh [SECONDS] [ROUNDS]   (default 5 seconds for each measurement, 5 rounds; medians are shown)
# Needs: wrk, nginx, postgresql (server and pgbench); as root it steps down for the database.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-5}
rounds=${2:-5}
connections=${CONNECTIONS:-64}
. benches/load/common.sh

# The API, and a plain proxy in front of it.
cat > "$work/nginx.conf" <<NGINX
worker_processes 1;
pid $work/nginx.pid;
error_log /dev/null;
events { worker_connections 4096; }
http {
  access_log off;
  keepalive_requests 1000000;
  client_body_temp_path $work/body;
  proxy_temp_path $work/proxy;
  upstream api { server 127.0.0.1:7301; keepalive 256; }
  server {
    listen 127.0.0.1:7301 backlog=4096;
    location / { default_type application/json; return 201 '{"id":"order-1029","status":"created","amount":"129.90","currency":"EUR"}'; }
  }
  server {
    listen 127.0.0.1:7302 backlog=4096;
    location / { proxy_pass http://api; proxy_http_version 1.1; proxy_set_header Connection ""; }
  }
}
NGINX
nginx -c "$work/nginx.conf" -e /dev/null

start_postgres 7303
psql="$pgbin/psql -qX -h 127.0.0.1 -p 7303 -U postgres"
$psql -c 'create database gateway' -c 'create database yardstick'
$psql -d yardstick -f "$here/tables.sql" >/dev/null 2>&1

config() { # name, store url, port
  cat > "$work/$1.toml" <<TOML
[server]
listen = "127.0.0.1:$3"
[admin]
listen = "127.0.0.1:0"
[upstream]
url = "http://127.0.0.1:7301"
[store]
url = "$2"
[policy]
tenant = { header = "X-Tenant-Id" }
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
[log]
level = "warn"
TOML
}
config sqlite "sqlite:$work/gateway.db" 7304
config postgres "postgres://postgres@127.0.0.1:7303/gateway" 7305
for store in sqlite postgres; do
  "$gateway" serve --config "$work/$store.toml" > "$work/$store.out" 2> "$work/$store.err" &
  until grep -q '^ready' "$work/$store.out"; do kill -0 $! || { cat "$work/$store.err"; exit 1; }; sleep 0.05; done
done

# Rate, errors and latencies. A run's keys are its own, so that what is meant as a first request is one.
load() { # port, keys, run
  RUN="$3" KEYS="$2" wrk -t1 -c"$connections" -d"${seconds}s" -s "$here/orders.lua" "http://127.0.0.1:$1/orders" | sed -n 's/^RESULT //p'
}
pairs() {
  "$pgbin/pgbench" -n -M prepared -h 127.0.0.1 -p 7303 -U postgres -f "$here/pairs.sql" -c "$connections" -j 1 -T "$seconds" yardstick 2>/dev/null | sed -n 's/^tps = \([0-9.]*\).*/\1 0 - -/p'
}
# Notes a measurement: its name, then rate, errors and latencies; and its ratio to the yardstick of the same round.
note() { # name, yardstick, measurement
  read -r rate errors p50 p99 <<< "$3"
  echo "$rate $errors $p50 $p99 $(awk "BEGIN { printf \"%.2f\", $rate / ${2%% *} }")" >> "$work/$1.rounds"
}
for round in $(seq "$rounds"); do
  plain=$(load 7302 0 plain); note plain "$plain" "$plain"
  for store in postgres:7305 sqlite:7304; do
    load "${store#*:}" 1000 "again$round" >/dev/null
    note "replays-${store%:*}" "$plain" "$(load "${store#*:}" 1000 "again$round")"
  done
  yard=$(pairs); note yard "$yard" "$yard"
  for store in postgres:7305 sqlite:7304; do
    note "first-${store%:*}" "$yard" "$(load "${store#*:}" 0 "first$round")"
  done
done

# The median of the rounds, column by column, and the ratio of each round.
row() { # name, label, of what
  median() { cut -d' ' -f"$1" "$work/$name.rounds" | sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
  local name=$1
  printf '%-40s %9.0f %8s %8s %7s   %s\n' "$2" "$(median 1)" "$(median 3)" "$(median 4)" "$(cut -d' ' -f2 "$work/$name.rounds" | awk '{ n += $1 } END { print n }')" \
    "$(median 5) of $3 ($(cut -d' ' -f5 "$work/$name.rounds" | paste -sd' '))"
}
printf '%-40s %9s %8s %8s %7s   %s\n' "$connections connections, $rounds x $seconds s each" "per s" "p50 ms" "p99 ms" "errors" "ratio (of each round)"
row plain "nginx as a plain proxy" nginx
row replays-postgres "replays, Postgres" nginx
row replays-sqlite "replays, SQLite" nginx
row yard "pgbench, the same two transactions" pgbench
row first-postgres "first requests, Postgres" pgbench
row first-sqlite "first requests, SQLite" pgbench

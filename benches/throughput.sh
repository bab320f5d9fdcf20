#!/usr/bin/env bash
# First requests and replays per second through the gateway, on both stores, beside two yardsticks measured in the same
# run: pgbench doing the same two transactions, and nginx as a plain proxy. Read the ratios; the figures themselves are the
# machine's. Everything runs on this machine: load, API, gateway and database share its cores.
#
# Usage: benches/throughput.sh [SECONDS]   (default 10 for each measurement)
# Needs: wrk, nginx, postgresql (server and pgbench); as root it steps down for the database.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-10}
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
config single "postgres://postgres@127.0.0.1:7303/gateway" 7306
for store in sqlite postgres single; do
  # One working thread, as wrk, nginx and pgbench have here; the others take one for each core.
  [ "$store" != single ] || export TOKIO_WORKER_THREADS=1
  "$gateway" serve --config "$work/$store.toml" > "$work/$store.out" 2> "$work/$store.err" &
  until grep -q '^ready' "$work/$store.out"; do kill -0 $! || { cat "$work/$store.err"; exit 1; }; sleep 0.05; done
done

round=0
load() { # port, keys
  round=$((round + 1))
  RUN="r$round" KEYS="$2" wrk -t1 -c"$connections" -d"${seconds}s" -s "$here/orders.lua" "http://127.0.0.1:$1/orders" | sed -n 's/^RESULT //p'
}
pairs() { # clients
  "$pgbin/pgbench" -n -M prepared -h 127.0.0.1 -p 7303 -U postgres -f "$here/pairs.sql" -c "$1" -j 1 -T "$seconds" yardstick 2>/dev/null | sed -n 's/^tps = \([0-9.]*\).*/\1/p'
}
row() { printf '%-44s %10.0f %10s %10s %8s   %s\n' "$@"; }
ratio() { awk "BEGIN { printf \"%.2f\", $1 / $2 }"; }

printf '%-44s %10s %10s %10s %8s   %s\n' "$connections connections, ${seconds} s each" "per s" "p50 ms" "p99 ms" "errors" "ratio"
read -r direct e50 p50 p99 <<< "$(load 7301 0)"; row "the API itself" "$direct" "$p50" "$p99" "$e50" ""
read -r plain e50 p50 p99 <<< "$(load 7302 0)"; row "nginx as a plain proxy" "$plain" "$p50" "$p99" "$e50" "1.00 (yardstick)"
yard=$(pairs "$connections"); row "pgbench, the same two transactions" "$yard" - - - "1.00 (yardstick)"
read -r rate e50 p50 p99 <<< "$(load 7305 0)"; row "first requests, Postgres" "$rate" "$p50" "$p99" "$e50" "$(ratio "$rate" "$yard") of pgbench"
read -r rate e50 p50 p99 <<< "$(load 7306 0)"; row "first requests, Postgres, one thread" "$rate" "$p50" "$p99" "$e50" "$(ratio "$rate" "$yard") of pgbench"
read -r rate e50 p50 p99 <<< "$(load 7304 0)"; row "first requests, SQLite" "$rate" "$p50" "$p99" "$e50" "$(ratio "$rate" "$yard") of pgbench"
load 7305 1000 >/dev/null
read -r rate e50 p50 p99 <<< "$(load 7305 1000)"; row "replays, Postgres" "$rate" "$p50" "$p99" "$e50" "$(ratio "$rate" "$plain") of nginx"
read -r rate e50 p50 p99 <<< "$(load 7304 1000)"; row "replays, SQLite" "$rate" "$p50" "$p99" "$e50" "$(ratio "$rate" "$plain") of nginx"

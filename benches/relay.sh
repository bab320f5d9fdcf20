#!/usr/bin/env bash
# What the relay does on Postgres: events a second from a backlog to a fast sink on this machine, beside pgbench that runs
# the same claim and acknowledgement alone in the same run; and how long after its record's completion an event arrives at
# 200 a second. Read the ratio; the figures themselves are the machine's. Sink, gateway and database share its cores.
#
# Usage: benches/relay.sh [EVENTS] [ROUNDS]   (default 20000 events in the backlog, 3 rounds)
# Needs: wrk, nginx, postgresql (server and pgbench); as root it steps down for the database.
set -euo pipefail
cd "$(dirname "$0")/.."
events=${1:-20000}
rounds=${2:-3}
. benches/load/common.sh

# The API, and the sink: it notes when it has read which event.
cat > "$work/nginx.conf" <<NGINX
worker_processes 1;
pid $work/nginx.pid;
error_log /dev/null;
events { worker_connections 4096; }
http {
  log_format receipt '\$msec \$http_webhook_id';
  access_log off;
  keepalive_requests 1000000;
  client_body_temp_path $work/body;
  proxy_temp_path $work/proxy;
  server {
    listen 127.0.0.1:7311 backlog=4096;
    location / { default_type application/json; return 201 '{"id":"order-1029","status":"created"}'; }
  }
  server {
    listen 127.0.0.1:7312 backlog=4096;
    location / { access_log $work/receipts receipt; return 204; }
  }
}
NGINX
nginx -c "$work/nginx.conf" -e /dev/null

start_postgres 7313
psql="$pgbin/psql -qXAt -h 127.0.0.1 -p 7313 -U postgres"
$psql -c 'create database gateway' -c 'create database yardstick'

config() { # database
  cat > "$work/$1.toml" <<TOML
[server]
listen = "127.0.0.1:7314"
[admin]
listen = "127.0.0.1:7315"
[upstream]
url = "http://127.0.0.1:7311"
[store]
url = "postgres://postgres@127.0.0.1:7313/$1"
[policy]
tenant = { header = "X-Tenant-Id" }
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
[[sink]]
name = "main"
url = "http://127.0.0.1:7312/hook"
secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
allow_private = true
concurrency = 64
[log]
level = "warn"
TOML
}
for database in gateway yardstick; do config $database; "$gateway" migrate --config "$work/$database.toml" >/dev/null; done

backlog() { # database
  $psql -d "$1" -v events="$events" -f "$here/backlog.sql"
}
# Both find the tables as a new installation has them: no statistics.
drained() { # seconds of the gateway
  : > "$work/receipts"; nginx -c "$work/nginx.conf" -e /dev/null -s reopen
  backlog gateway
  "$gateway" serve --config "$work/gateway.toml" > "$work/out" 2> "$work/err" &
  local serve=$!
  until [ "$($psql -d gateway -c 'select count(*) from outbox_queue')" = 0 ]; do
    kill -0 $serve || { cat "$work/err" >&2; exit 1; }
    sleep 0.2
  done
  kill $serve; wait $serve || true
  # From the first receipt to the last acknowledgement.
  local first; first=$(head -1 "$work/receipts" | cut -d' ' -f1)
  $psql -d gateway -c "select $events / (extract(epoch from max(finished_at)) - $first) from outbox_done"
  $psql -d gateway -c "select $events::float8 / count(distinct xmin::text) from outbox_done" > "$work/batch"
  $psql -d gateway -c 'truncate outbox_messages, outbox_queue, outbox_done' -c 'vacuum'
}
yard() { # clients, batch
  backlog yardstick
  local begun ended
  begun=$(date +%s.%N)
  "$pgbin/pgbench" -n -M prepared -h 127.0.0.1 -p 7313 -U postgres -f "$here/drain.sql" -D batch="$2" \
    -c "$1" -j 1 -t "$((events / $2 / $1 + 1))" yardstick > "$work/pgbench" 2>&1
  ended=$(date +%s.%N)
  local left; left=$($psql -d yardstick -c 'select count(*) from outbox_queue')
  $psql -d yardstick -c 'truncate outbox_messages, outbox_queue, outbox_done' -c 'vacuum'
  awk "BEGIN { printf \"%.0f\", ($events - $left) / ($ended - $begun) }"
}

printf '%-10s %14s %20s %20s %8s\n' "$events events" "relay" "pgbench, 1 client" "pgbench, 2 clients" "ratio"
for round in $(seq "$rounds"); do
  relay=$(drained)
  batch=$(awk '{ printf "%d", ($1 < 1 ? 1 : $1) }' "$work/batch")
  one=$(yard 1 "$batch"); two=$(yard 2 "$batch")
  printf '%-10s %12.0f/s %18s/s %18s/s %8s   (%s events an acknowledgement)\n' "round $round" "$relay" "$one" "$two" \
    "$(awk "BEGIN { printf \"%.2f\", $relay / ($one > $two ? $one : $two) }")" "$batch"
done

# From the completion (just before its commit) to the sink's receipt, at 200 a second.
: > "$work/receipts"; nginx -c "$work/nginx.conf" -e /dev/null -s reopen
"$gateway" serve --config "$work/gateway.toml" > "$work/out" 2> "$work/err" &
until grep -q '^ready' "$work/out"; do kill -0 $! || { cat "$work/err"; exit 1; }; sleep 0.05; done
RUN=paced PACE=95 wrk -t1 -c20 -d10s -s "$here/orders.lua" http://127.0.0.1:7314/orders > "$work/wrk"
sleep 1
$psql -d gateway -c 'create table receipts (at float8, id uuid)'
$psql -d gateway -c "\\copy receipts from '$work/receipts' delimiter ' '"
$psql -d gateway -F ' ' -c "
  select 'latency at ' || round(count(*) / 10.0) || ' events/s: median '
    || round((percentile_cont(0.5) within group (order by ms))::numeric, 1) || ' ms, p99 '
    || round((percentile_cont(0.99) within group (order by ms))::numeric, 1) || ' ms'
  from (select (min(r.at) - extract(epoch from m.created_at)::float8) * 1000 as ms
        from outbox_messages m join receipts r on r.id = m.id group by m.id, m.created_at) l"

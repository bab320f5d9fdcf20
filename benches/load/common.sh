# The common part of the benchmarks, to be read by them from the project's folder: a working folder that goes at the end with all
# that was started, the program as it is shipped, and a private PostgreSQL.

here=$PWD/benches/load
work=$(mktemp -d)
chmod 755 "$work"
pgbin=$(dirname "$(readlink -f "$(ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null | tail -1 || command -v initdb)")")
step_down=()
if [ "$(id -u)" = 0 ]; then step_down=(setpriv --reuid=postgres --regid=postgres --clear-groups); fi
cleanup() {
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
  "${step_down[@]}" "$pgbin/pg_ctl" -D "$work/pg" -m immediate stop >/dev/null 2>&1 || true
  [ -f "$work/nginx.pid" ] && kill "$(cat "$work/nginx.pid")" 2>/dev/null || true
  sleep 0.2
  rm -rf "$work"
}
trap cleanup EXIT

cargo build --locked --profile dist --quiet
gateway=$PWD/target/dist/oncegate

# A database server with full durability. $1: its port.
start_postgres() {
  mkdir "$work/pg"; if [ "$(id -u)" = 0 ]; then chown postgres "$work/pg"; fi
  "${step_down[@]}" "$pgbin/initdb" -D "$work/pg" -A trust -U postgres >/dev/null
  cat >> "$work/pg/postgresql.conf" <<PG
port = $1
listen_addresses = '127.0.0.1'
unix_socket_directories = '$work/pg'
shared_buffers = 1GB
max_wal_size = 4GB
max_connections = 200
PG
  "${step_down[@]}" "$pgbin/pg_ctl" -D "$work/pg" -l "$work/pg/log" -w start >/dev/null
}

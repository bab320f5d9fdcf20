-- The shape of a record and of an event, as far as their cost goes, for the yardstick in pairs.sql.
drop table if exists bench_records, bench_events;
create table bench_records (
    id uuid not null,
    tenant_id text not null,
    operation text not null,
    key text not null,
    request_hash bytea not null,
    status text not null,
    attempt int not null default 1,
    created_at timestamptz not null,
    completed_at timestamptz,
    expires_at timestamptz,
    response_status int,
    response_headers bytea,
    response_body bytea,
    primary key (tenant_id, operation, key)
) with (fillfactor = 60);
create index on bench_records (created_at);
create table bench_events (
    id uuid primary key,
    event_key text not null unique,
    event_type text not null,
    idempotency_key text not null,
    record_id uuid not null,
    sink text not null,
    payload bytea not null,
    created_at timestamptz not null default now()
);
create index on bench_events (idempotency_key);

-- The relay's statements as it runs them, with the answer of each claim folded into one row for the acknowledgement.
begin isolation level read committed;
set local enable_seqscan = off;
set local enable_bitmapscan = off;
with c as materialized (
    select ctid as place from outbox_queue
    where sink = 'main' and lane = 0
      and next_attempt_at <= (select clock_timestamp())
      and next_attempt_at >= (select clock_timestamp() - interval '100 years')
      and (lease_until <= clock_timestamp()
        or (true and claimed_by is not null and not (coalesce((
          select o.lease_until from oncegate_owners o where o.owner = claimed_by), '-infinity') > clock_timestamp())))
    order by next_attempt_at, event_id limit :batch for update of outbox_queue skip locked),
u as (
    update outbox_queue q
    set lease_until = clock_timestamp() + interval '35 seconds', claim_no = q.claim_no + 1,
        claimed_by = '00000000-0000-4000-8000-000000000000'
    from c where q.ctid = c.place
    returning q.event_id, q.claim_no, q.attempts, q.created_at),
e as materialized (
    select u.event_id, u.claim_no, u.attempts, extract(epoch from clock_timestamp() - u.created_at)::float8 as age,
           m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.payload
    from u join outbox_messages m on m.id = u.event_id
    order by u.created_at, m.record_id, m.seq, u.event_id)
select coalesce(array_agg(event_id order by event_id), '{}')::text as ids,
       coalesce(array_agg(claim_no order by event_id), '{}')::text as claims,
       coalesce(sum(length(payload)), 0) as bytes
from e \gset
commit;
with x as materialized (
    select i as event_id, c as claim_no, 'sent'::text as outcome, 204 as status, null::text as error
    from unnest((:ids)::uuid[], (:claims)::int[]) as x(i, c) order by i),
found as (
    select x.*, q.place from x cross join lateral (
        select r.ctid as place, r.* from outbox_queue r where (r.event_id, r.sink) >= (x.event_id, 'main')
        order by r.event_id, r.sink limit 1) as q
    where q.event_id = x.event_id and q.sink = 'main'),
gone as (
    delete from outbox_queue q using found x
    where q.ctid = x.place and q.claim_no = x.claim_no and q.lease_until <> '-infinity'
    returning q.event_id, q.sink, q.claim_no, q.attempts + 1 as attempts, x.outcome, x.status, x.error, q.ordering_key),
kept as (
    insert into outbox_done (event_id, sink, outcome, claim_no, attempts, last_status, last_error, finished_at)
    select event_id, sink, outcome, claim_no, attempts, status, error, clock_timestamp() from gone order by event_id
    on conflict (event_id, sink) do update
    set outcome = excluded.outcome, claim_no = excluded.claim_no, attempts = excluded.attempts,
        last_status = excluded.last_status, last_error = excluded.last_error, finished_at = excluded.finished_at)
select count(*) from (select event_id, ordering_key from gone) g \gset gone_

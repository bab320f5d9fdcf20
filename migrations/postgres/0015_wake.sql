-- What verdicts in order look up, they look up by the one index that serves, whatever the server believes of the tables.

-- The key comes first: by an index that begins with the sink, all turns that the sink ever gave would be walked over wherever
-- the server believes that there are none, for as long as somebody's snapshot keeps them.
ALTER TABLE outbox_turns
    DROP CONSTRAINT outbox_turns_pkey,
    ADD PRIMARY KEY (ordering_key, sink);

-- Makes the next event of each key due, whatever its time is, except for `spared`: those keep the time that they have. The
-- next one may be about to be put off by somebody who holds it just now. He is waited for; the row is at another place then,
-- so it is looked up again, on a newer snapshot. What is in flight needs no wake, and its verdict would find another row.
-- Kept plans as in 0013. The gateway's own.
CREATE FUNCTION oncegate_wake(of_sink text, keys text[], spared uuid[]) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    next uuid[];
BEGIN
    WITH k AS MATERIALIZED (
        SELECT DISTINCT k.ordering_key FROM unnest(keys) AS k(ordering_key)),
    first AS MATERIALIZED (
        SELECT f.event_id, f.place FROM k CROSS JOIN LATERAL (
            SELECT q.event_id, q.ctid AS place FROM outbox_queue q
            WHERE q.sink = of_sink AND q.ordering_key = k.ordering_key
            ORDER BY q.created_at, q.seq, q.event_id LIMIT 1) AS f
        WHERE f.event_id <> ALL (spared) ORDER BY f.event_id),
    held AS MATERIALIZED (
        SELECT q.event_id FROM first f JOIN outbox_queue q ON q.ctid = f.place FOR UPDATE OF q)
    -- What is not asked for is not run, nor are its locks taken: hence the count.
    SELECT array_agg(f.event_id) INTO next FROM first f
    WHERE (SELECT count(*) FROM held) IS NOT NULL;

    WITH found AS MATERIALIZED (
        SELECT q.place FROM unnest(next) AS x(event_id) CROSS JOIN LATERAL (
            SELECT r.ctid AS place, r.event_id, r.sink FROM outbox_queue r
            WHERE (r.event_id, r.sink) >= (x.event_id, of_sink)
            ORDER BY r.event_id, r.sink LIMIT 1) AS q
        WHERE q.event_id = x.event_id AND q.sink = of_sink)
    UPDATE outbox_queue q SET next_attempt_at = clock_timestamp() FROM found f
    WHERE q.ctid = f.place AND q.lease_until <= clock_timestamp();
END
$$;

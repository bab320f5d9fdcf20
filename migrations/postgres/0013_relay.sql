-- The two statements that the relay runs all the time, as functions: the server keeps their plans (see 0007, which says what
-- that asks for). The functions are the gateway's own: names, arguments and results may change with its version.

-- Claims what may be claimed: of a sink and lane, due, from `place` on or else for no longer than `floor` seconds, and free.
-- `judges`: claims of processes whose lease has ended are over as well. The clock stands in a sub-select because only a value
-- that is fixed for the statement can bound an index scan. A row whose newer version was locked is not at its place for this
-- statement: the next look takes it. MATERIALIZED: the limited look must not be run again for each row. Nor may the look go by
-- an index that does not give the order, and be sorted: it would read all of that.
CREATE FUNCTION oncegate_claim(of_sink text, of_lane smallint, at_most bigint, lease float8,
                               floor float8, owner uuid, judges bool, place timestamptz)
RETURNS TABLE (event_id uuid, claim_no int, attempts int, refusals int, age float8,
               event_type text, tenant_id text, operation text, idempotency_key text,
               payload bytea)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH c AS MATERIALIZED (
        SELECT ctid AS at FROM outbox_queue
        WHERE sink = of_sink AND lane = of_lane
          AND next_attempt_at <= (SELECT clock_timestamp())
          AND (lease_until <= clock_timestamp()
            OR (judges AND claimed_by IS NOT NULL AND NOT (coalesce((
                SELECT o.lease_until FROM oncegate_owners o WHERE o.owner = claimed_by),
                '-infinity') > clock_timestamp())))
          AND next_attempt_at >= (
            SELECT coalesce(place, clock_timestamp() - make_interval(secs => floor)))
        ORDER BY next_attempt_at, event_id LIMIT at_most FOR UPDATE OF outbox_queue SKIP LOCKED),
    u AS (
        UPDATE outbox_queue q
        SET lease_until = clock_timestamp() + make_interval(secs => lease),
            claim_no = q.claim_no + 1, claimed_by = oncegate_claim.owner
        FROM c WHERE q.ctid = c.at
        RETURNING q.event_id, q.claim_no, q.attempts, q.refusals, q.created_at)
    SELECT u.event_id, u.claim_no, u.attempts, u.refusals,
           extract(epoch FROM clock_timestamp() - u.created_at)::float8,
           m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.payload
    FROM u JOIN outbox_messages m ON m.id = u.event_id
    ORDER BY u.created_at, m.record_id, m.seq, u.event_id;
END
$$;

-- Ends deliveries whose claim still stands. A lease of '-infinity': the claim of this number has got its verdict already. So a
-- verdict that is said twice, as after a lost answer, counts once. Each row is looked up by the order of one index, and changed
-- at its place.
CREATE FUNCTION oncegate_finish(of_sink text, ids uuid[], claims int[], outcomes text[],
                                statuses int[], errors text[])
RETURNS TABLE (event_id uuid, ordering_key text)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH x AS MATERIALIZED (
        SELECT * FROM unnest(ids, claims, outcomes, statuses, errors)
          AS x(event_id, claim_no, outcome, status, error)
        ORDER BY x.event_id),
    found AS (
        SELECT x.*, q.place FROM x CROSS JOIN LATERAL (
            SELECT r.ctid AS place, r.event_id, r.sink FROM outbox_queue r
            WHERE (r.event_id, r.sink) >= (x.event_id, of_sink)
            ORDER BY r.event_id, r.sink LIMIT 1) AS q
        WHERE q.event_id = x.event_id AND q.sink = of_sink),
    gone AS (
        DELETE FROM outbox_queue q USING found x
        WHERE q.ctid = x.place AND q.claim_no = x.claim_no AND q.lease_until <> '-infinity'
        RETURNING q.event_id, q.sink, q.claim_no, q.attempts + 1 AS attempts,
                  x.outcome, x.status, x.error, q.ordering_key),
    kept AS (
        INSERT INTO outbox_done (event_id, sink, outcome, claim_no, attempts, last_status,
                                 last_error, finished_at)
        SELECT gone.event_id, gone.sink, gone.outcome, gone.claim_no, gone.attempts, gone.status,
               gone.error, clock_timestamp()
        FROM gone ORDER BY gone.event_id
        ON CONFLICT (event_id, sink) DO UPDATE
        SET outcome = excluded.outcome, claim_no = excluded.claim_no,
            attempts = excluded.attempts, last_status = excluded.last_status,
            last_error = excluded.last_error, finished_at = excluded.finished_at),
    noted AS (
        INSERT INTO outbox_attempts (event_id, sink, slot, claim_no, attempt, at, status, error)
        SELECT gone.event_id, gone.sink, gone.claim_no % 50, gone.claim_no, gone.attempts,
               clock_timestamp(), gone.status, gone.error
        FROM gone WHERE gone.outcome = 'dead' ORDER BY gone.event_id
        ON CONFLICT (event_id, sink, slot) DO UPDATE
        SET claim_no = excluded.claim_no, attempt = excluded.attempt, at = excluded.at,
            status = excluded.status, error = excluded.error)
    SELECT gone.event_id, gone.ordering_key FROM gone;
END
$$;

-- The two batched statements of every first request, as functions: the server keeps their plans, so that a batch is
-- neither parsed nor planned anew, and a pooler that hands each transaction another connection does no harm.
--
-- A plan that is kept must be right for a table of any size. So it is pinned: rows are looked up by index, one by one.
-- Whoever holds a row in the way is waited for 20 ms, which is long enough for a change of ours that is about to commit;
-- then the batch fails and has changed nothing. The functions are the gateway's own: names, arguments and results may
-- change with its version.

-- Reserves what stands under nobody's scope. `held`: inserted; `live`: the owner's lease had not ended. The rows go in
-- sorted by scope, so that two replicas wait for each other in one direction only.
CREATE FUNCTION oncegate_reserve_batch(ids uuid[], tenants text[], operations text[], keys text[],
                                       hashes bytea[], raws bytea[], recipes bytea[],
                                       owners uuid[], callers text[], contexts bytea[],
                                       retentions float8[])
RETURNS TABLE (id uuid, held boolean, live boolean)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET lock_timeout = '20ms' AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH p AS MATERIALIZED (
        SELECT *
        FROM unnest(ids, tenants, operations, keys, hashes, raws, recipes, owners, callers,
                    contexts, retentions)
          AS p(id, tenant_id, operation, key, request_hash, raw_hash, recipe, owner, caller,
               context, retention)),
    alive AS MATERIALIZED (
        SELECT o.owner FROM oncegate_owners o
        WHERE o.owner = ANY (owners) AND o.lease_until > clock_timestamp()),
    made AS (
        INSERT INTO idempotency_records (id, tenant_id, operation, key, request_hash, raw_hash,
                                         recipe, status, attempt, owner, caller,
                                         request_context, created_at, retention)
        SELECT p.id, p.tenant_id, p.operation, p.key, p.request_hash, p.raw_hash, p.recipe,
               'in_progress', 1, p.owner, p.caller, p.context, clock_timestamp(),
               make_interval(secs => p.retention)
        FROM p WHERE p.owner IN (SELECT alive.owner FROM alive)
        ORDER BY p.tenant_id, p.operation, p.key
        ON CONFLICT (tenant_id, operation, key) DO NOTHING
        RETURNING idempotency_records.id)
    SELECT p.id, p.id IN (SELECT made.id FROM made), p.owner IN (SELECT alive.owner FROM alive)
    FROM p;
END
$$;

-- Completes what is still in progress, or unknown, under its attempt, and writes the events of what it completed and
-- queues them for their sinks. `expires_at` is null where the fence did not hold.
CREATE FUNCTION oncegate_complete_batch(ids uuid[], attempts int[], tenants text[],
                                        operations text[], keys text[], statuses int[],
                                        headers bytea[], bodies bytea[], retentions float8[],
                                        event_records uuid[], event_ids uuid[],
                                        event_keys text[], positions int[], kinds text[],
                                        ordering_keys text[], payloads bytea[], wanted bool[],
                                        sink_events uuid[], sinks text[])
RETURNS TABLE (id uuid, expires_at timestamptz)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET lock_timeout = '20ms' AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH c AS MATERIALIZED (
        SELECT x.*, clock_timestamp() AS at
        FROM unnest(ids, attempts, tenants, operations, keys, statuses, headers, bodies,
                    retentions)
          AS x(id, attempt, tenant_id, operation, key, response_status, headers, body, retention)
        ORDER BY x.tenant_id, x.operation, x.key),
    done AS (
        UPDATE idempotency_records r
        SET status = 'completed', completed_at = c.at,
            expires_at = c.at + make_interval(secs => c.retention),
            response_status = c.response_status, response_headers = c.headers,
            response_body = c.body, request_context = NULL
        FROM c
        WHERE r.tenant_id = c.tenant_id AND r.operation = c.operation AND r.key = c.key
          AND r.id = c.id AND r.attempt = c.attempt AND r.status IN ('in_progress', 'unknown')
        RETURNING r.id, r.tenant_id, r.operation, r.key, r.expires_at, c.at),
    message AS (
        INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                                     idempotency_key, record_id, ordering_key, payload, wanted,
                                     created_at)
        SELECT e.id, e.event_key, e.seq, e.event_type, done.tenant_id, done.operation, done.key,
               done.id, e.ordering_key, e.payload, e.wanted, done.at
        FROM unnest(event_records, event_ids, event_keys, positions, kinds, ordering_keys,
                    payloads, wanted)
          AS e(record_id, id, event_key, seq, event_type, ordering_key, payload, wanted)
        JOIN done ON done.id = e.record_id
        ORDER BY e.event_key
        ON CONFLICT (id) DO NOTHING
        RETURNING outbox_messages.id, outbox_messages.seq, outbox_messages.ordering_key,
                  outbox_messages.created_at),
    queued AS (
        INSERT INTO outbox_queue (event_id, sink, next_attempt_at, ordering_key, seq, created_at)
        SELECT m.id, s.sink, m.created_at, m.ordering_key, m.seq, m.created_at
        FROM unnest(sink_events, sinks) AS s(event_id, sink) JOIN message m ON m.id = s.event_id
        ORDER BY m.id, s.sink
        ON CONFLICT (event_id, sink) DO NOTHING)
    SELECT c.id, done.expires_at FROM c LEFT JOIN done ON done.id = c.id;
END
$$;

-- An event's id is made from its key, so the id's constraint keeps both unique; and the sweep finds what no sink wanted by
-- the time that everything is listed by. A first request writes less.
ALTER TABLE outbox_messages DROP CONSTRAINT outbox_messages_event_key;
DROP INDEX outbox_messages_unwanted;

-- Which events each sink wants, as the configuration says: patterns of their types for LIKE. Null: all of them, also where a
-- program wrote the row that did not know this column.
ALTER TABLE oncegate_sinks ADD COLUMN events text[];

-- Announces an event of a record that this transaction completes, before or after it does so: one event for each name.
-- The event's id.
--
-- Its key has a ':' where those that the gateway makes have a '/', and its id is a UUID of version 8 (SHA-256 of a
-- namespace and the key, RFC 9562, B.2) where theirs are of version 5: neither can meet one of the gateway's.
CREATE OR REPLACE FUNCTION oncegate_emit(record_id uuid, event_name text, type text, payload jsonb) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    scope      record;
    this_one   record;
    event_key  text := oncegate_emit.record_id::text || ':' || oncegate_emit.event_name;
    hash       bytea := sha256('\x6f1d7c5294a84b0e8a3c5e2fd19b7046'::bytea
                               || convert_to(event_key, 'UTF8'));
    event_id   uuid := encode(substr(set_byte(set_byte(hash, 6, (get_byte(hash, 6) & 15) | 128),
                                              8, (get_byte(hash, 8) & 63) | 128), 1, 16),
                              'hex')::uuid;
    now_at     timestamptz;
    message    text;
BEGIN
    IF NOT (oncegate_emit.event_name ~ '\S' AND oncegate_emit.event_name !~ '[[:cntrl:]]'
            AND octet_length(oncegate_emit.event_name) <= 255) IS TRUE THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'oncegate_emit: event_name is 1 to 255 bytes of visible text';
    END IF;
    IF NOT (oncegate_emit.type ~ '\S' AND oncegate_emit.type !~ '[[:cntrl:]]'
            AND octet_length(oncegate_emit.type) <= 255) IS TRUE THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'oncegate_emit: type is 1 to 255 bytes of visible text';
    END IF;
    SELECT r.tenant_id, r.operation, r.key, r.status INTO scope
    FROM idempotency_records r WHERE r.id = oncegate_emit.record_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM oncegate_refuse(
            'there is no record ' || coalesce(oncegate_emit.record_id::text, 'without an id'),
            'It was released, or it has expired. Another execution may be under way.');
    END IF;
    INSERT INTO oncegate_transactions AS t (record_id, xact, completed, events)
    VALUES (oncegate_emit.record_id, pg_current_xact_id(), false, 1)
    ON CONFLICT (record_id, xact) DO UPDATE SET events = t.events + 1
    RETURNING t.completed, t.events INTO this_one;
    IF scope.status = 'completed' AND NOT this_one.completed THEN
        PERFORM oncegate_refuse(
            'record ' || oncegate_emit.record_id::text || ' was completed by another transaction',
            'Events are announced in the transaction that calls oncegate_complete.');
    END IF;
    now_at := clock_timestamp();
    message := '{"type":' || to_json(oncegate_emit.type)::text
        || ',"timestamp":"'
        || to_char(now_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
        || '","data":' || coalesce(oncegate_emit.payload::text, 'null')
        || ',"tenant":' || to_json(scope.tenant_id)::text
        || ',"operation":' || to_json(scope.operation)::text
        || ',"idempotency_key":' || to_json(scope.key)::text
        || ',"id":"' || event_id::text || '"}';
    IF octet_length(message) > 1048576 THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'oncegate_emit: the message is larger than 1 MiB';
    END IF;
    INSERT INTO outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
                                 idempotency_key, record_id, payload, wanted, created_at)
    VALUES (event_id, event_key, this_one.events - 1, oncegate_emit.type, scope.tenant_id,
            scope.operation, scope.key, oncegate_emit.record_id, convert_to(message, 'UTF8'),
            EXISTS (SELECT FROM oncegate_sinks s
                    WHERE s.events IS NULL OR oncegate_emit.type LIKE ANY (s.events)), now_at)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO outbox_queue (event_id, sink, next_attempt_at, seq, created_at)
        SELECT event_id, s.name, now_at, this_one.events - 1, now_at FROM oncegate_sinks s
        WHERE s.events IS NULL OR oncegate_emit.type LIKE ANY (s.events);
    END IF;
    RETURN event_id;
END
$$;

-- Replacing a function takes its settings away, not its owner and his grants.
DO $$
DECLARE
    home text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                  WHERE c.oid = 'idempotency_records'::regclass);
BEGIN
    EXECUTE format('ALTER FUNCTION oncegate_emit(uuid, text, text, jsonb)
                    SET search_path = pg_catalog, %I, pg_temp', home);
END
$$;

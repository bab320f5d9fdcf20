-- For applications on the same database: the record and its events, written in the application's own transaction.

-- How long the answer will be kept, from its completion on. Written at the reservation, so that whoever completes the
-- record needs no configuration. Null: reserved by a program that did not know this column.
ALTER TABLE idempotency_records ADD COLUMN retention interval;

-- To whom the events of applications go: the names of the configured sinks, as the last `serve` that started has them.
CREATE TABLE oncegate_sinks (
    name text COLLATE "C" PRIMARY KEY
);

-- Which records a transaction that is still open completes, and how many events it has given them. A row is never
-- committed: the trigger below deletes it at the commit. So nothing of it needs the write-ahead log.
CREATE UNLOGGED TABLE oncegate_transactions (
    record_id uuid    NOT NULL,
    xact      xid8    NOT NULL,  -- the outermost transaction: a savepoint changes nothing
    completed boolean NOT NULL,  -- whether it has called oncegate_complete
    events    int     NOT NULL,  -- how often it has called oncegate_emit
    PRIMARY KEY (record_id, xact)
);

-- Why a call does not fit the record as it stands. The caller's transaction is lost, and so is all that it wrote.
CREATE FUNCTION oncegate_refuse(message text, hint text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'OG001', MESSAGE = 'oncegate: ' || message, HINT = hint;
END
$$;

-- Completes a record in the caller's transaction, under the attempt that the caller was asked to execute. From here to
-- the end of the transaction nobody else changes the record. When its answer expires.
CREATE FUNCTION oncegate_complete(record_id uuid, attempt int, status int, content_type text,
                                  body bytea) RETURNS timestamptz
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    found_status  text;
    found_attempt int;
    now_at        timestamptz;
    ends_at       timestamptz;
BEGIN
    IF oncegate_complete.status IS NULL OR oncegate_complete.status NOT BETWEEN 200 AND 599 THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'oncegate_complete: status is a final HTTP status, 200 to 599';
    END IF;
    IF oncegate_complete.content_type !~ '^[!-~]([ -~]*[!-~])?$' THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = 'oncegate_complete: content_type is null or visible ASCII in one line';
    END IF;
    -- The row is locked first: what is read is then what stands, and the time is that after the wait.
    SELECT r.status, r.attempt INTO found_status, found_attempt
    FROM idempotency_records r WHERE r.id = oncegate_complete.record_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM oncegate_refuse(
            'there is no record ' || coalesce(oncegate_complete.record_id::text, 'without an id'),
            'It was released, or it has expired. Another execution may be under way.');
    ELSIF found_attempt IS DISTINCT FROM oncegate_complete.attempt THEN
        PERFORM oncegate_refuse(
            'record ' || oncegate_complete.record_id::text || ' is at attempt '
            || found_attempt::text || ', not at '
            || coalesce(oncegate_complete.attempt::text, 'none'),
            'Another attempt has taken over, or an operator has resolved the record.');
    ELSIF found_status = 'completed' THEN
        PERFORM oncegate_refuse(
            'record ' || oncegate_complete.record_id::text || ' is completed already',
            'It has its answer. What this transaction wrote would be there twice.');
    END IF;
    now_at := clock_timestamp();
    UPDATE idempotency_records r
    SET status = 'completed', completed_at = now_at,
        expires_at = now_at + coalesce(r.retention, interval '24 hours'),
        response_status = oncegate_complete.status::smallint,
        response_headers = convert_to(
            coalesce('content-type: ' || oncegate_complete.content_type || E'\r\n', ''), 'UTF8'),
        response_body = coalesce(oncegate_complete.body, ''::bytea), request_context = NULL
    WHERE r.id = oncegate_complete.record_id AND r.attempt = oncegate_complete.attempt
      AND r.status IN ('in_progress', 'unknown')
    RETURNING r.expires_at INTO ends_at;
    INSERT INTO oncegate_transactions AS t (record_id, xact, completed, events)
    VALUES (oncegate_complete.record_id, pg_current_xact_id(), true, 0)
    ON CONFLICT (record_id, xact) DO UPDATE SET completed = true;
    RETURN ends_at;
END
$$;

-- Announces an event of a record that this transaction completes, before or after it does so: one event for each name.
-- The event's id.
--
-- Its key has a ':' where those that the gateway makes have a '/', and its id is a UUID of version 8 (SHA-256 of a
-- namespace and the key, RFC 9562, B.2) where theirs are of version 5: neither can meet one of the gateway's.
CREATE FUNCTION oncegate_emit(record_id uuid, event_name text, type text, payload jsonb) RETURNS uuid
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
            EXISTS (SELECT FROM oncegate_sinks), now_at)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO outbox_queue (event_id, sink, next_attempt_at, seq, created_at)
        SELECT event_id, s.name, now_at, this_one.events - 1, now_at FROM oncegate_sinks s;
    END IF;
    RETURN event_id;
END
$$;

-- At the commit: events without the completion that they announce are no events.
CREATE FUNCTION oncegate_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off AS $$
DECLARE
    done boolean;
BEGIN
    DELETE FROM oncegate_transactions t
    WHERE t.record_id = NEW.record_id AND t.xact = NEW.xact
    RETURNING t.completed INTO done;
    IF NOT done THEN
        PERFORM oncegate_refuse(
            'events of record ' || NEW.record_id::text || ' were announced, and it was not completed',
            'Call oncegate_complete in the transaction that calls oncegate_emit.');
    END IF;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER oncegate_at_commit AFTER INSERT ON oncegate_transactions
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION oncegate_at_commit();

-- They run with their owner's rights, on their owner's tables, whatever the caller's search_path says; and nobody calls
-- them who was not told that he may.
DO $$
DECLARE
    signature text;
    home      text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                       WHERE c.oid = 'idempotency_records'::regclass);
BEGIN
    FOREACH signature IN ARRAY ARRAY['oncegate_complete(uuid, int, int, text, bytea)',
                                     'oncegate_emit(uuid, text, text, jsonb)',
                                     'oncegate_at_commit()', 'oncegate_refuse(text, text)'] LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', signature, home);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', signature);
    END LOOP;
END
$$;

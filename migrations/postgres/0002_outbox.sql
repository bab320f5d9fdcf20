-- The outbox: content that is written once, a narrow queue of what is owed, and what is done.

CREATE TABLE outbox_messages (
    id              uuid        PRIMARY KEY,  -- the event's id, the same in all attempts; made from event_key
    event_key       text        COLLATE "C" NOT NULL,     -- record id and event name (and element): unique and stable
    seq             int         NOT NULL,     -- position among the events of its record
    event_type      text        NOT NULL,     -- order.created, say
    tenant_id       text        COLLATE "C" NOT NULL,     -- the record's scope
    operation       text        NOT NULL,
    idempotency_key text        COLLATE "C" NOT NULL,
    record_id       uuid        NOT NULL,     -- the record that it announces
    ordering_key    text,                     -- events with equal keys may be delivered in order
    content_type    text        NOT NULL DEFAULT 'application/json',
    payload         bytea       NOT NULL,     -- exactly the bytes that are sent and signed
    created_at      timestamptz NOT NULL,     -- when the record was completed
    CONSTRAINT outbox_messages_event_key UNIQUE (event_key)
);
CREATE INDEX outbox_messages_lookup ON outbox_messages (idempotency_key, tenant_id);
CREATE INDEX outbox_messages_record ON outbox_messages (record_id);
CREATE INDEX outbox_messages_created ON outbox_messages (created_at, id);

-- A row stands here only while a delivery is owed. Claims change no indexed column.
CREATE TABLE outbox_queue (
    event_id        uuid        NOT NULL,
    sink            text        COLLATE "C" NOT NULL,
    lane            smallint    NOT NULL DEFAULT 0,            -- 0 fresh, 1 tried before or redelivered
    next_attempt_at timestamptz NOT NULL,                      -- due from then on; changes only on failure
    lease_until     timestamptz NOT NULL DEFAULT '-infinity',  -- claimed until then; not indexed
    claim_no        int         NOT NULL DEFAULT 0,            -- fence of claims; only ever grows
    attempts        int         NOT NULL DEFAULT 0,            -- attempts that finished and failed
    ordering_key    text,
    seq             int         NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL,                      -- of the message
    last_status     int,                                       -- the sink's last status
    last_error      text,                                      -- what went wrong last
    PRIMARY KEY (event_id, sink)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX outbox_queue_due ON outbox_queue (sink, lane, next_attempt_at, event_id);
CREATE INDEX outbox_queue_order ON outbox_queue (sink, ordering_key, created_at, seq, event_id)
    WHERE ordering_key IS NOT NULL;

-- Append-only: how each delivery ended.
CREATE TABLE outbox_done (
    event_id    uuid        NOT NULL,
    sink        text        COLLATE "C" NOT NULL,  -- '': no sink wanted the event
    outcome     text        NOT NULL   CHECK (outcome IN ('sent', 'dead', 'discarded')),
    claim_no    int         NOT NULL,  -- goes on from here when the event is redelivered
    attempts    int         NOT NULL,
    last_status int,
    last_error  text,
    finished_at timestamptz NOT NULL,
    PRIMARY KEY (event_id, sink)
);
CREATE INDEX outbox_done_dead ON outbox_done (sink, finished_at, event_id) WHERE outcome = 'dead';
CREATE INDEX outbox_done_finished ON outbox_done (finished_at) WHERE outcome <> 'dead';

-- One row for each event and sink, as people and other programs read it.
CREATE VIEW outbox_events AS
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       q.sink, m.ordering_key, m.payload, 'pending'::text AS status, q.attempts,
       q.next_attempt_at, q.last_error, m.created_at, NULL::timestamptz AS sent_at
FROM outbox_queue q JOIN outbox_messages m ON m.id = q.event_id
UNION ALL
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       d.sink, m.ordering_key, m.payload, d.outcome AS status, d.attempts,
       NULL::timestamptz AS next_attempt_at, d.last_error, m.created_at,
       CASE WHEN d.outcome = 'sent' THEN d.finished_at END AS sent_at
FROM outbox_done d JOIN outbox_messages m ON m.id = d.event_id;

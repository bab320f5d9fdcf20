-- Records, leases and the operators' log.

-- One row for each scope that was reserved. Written twice on the usual way: the reservation inserts it, the
-- completion updates it in place. So nothing indexed may change at a completion, and each page keeps room for the
-- second version of its rows.
CREATE TABLE idempotency_records (
    id               uuid        NOT NULL,  -- made by the gateway; new for each new request, also in a row taken over after expiry
    -- Compared by bytes: no collation of the server's makes two keys one, and none makes look-ups slower.
    tenant_id        text        COLLATE "C" NOT NULL,  -- whose key
    operation        text        COLLATE "C" NOT NULL,  -- for which operation
    key              text        COLLATE "C" NOT NULL,  -- the idempotency key
    request_hash     bytea       NOT NULL,  -- SHA-256 of the canonical request
    raw_hash         bytea       NOT NULL,  -- SHA-256 of the request as received; decides where the recipes differ
    recipe           bytea       NOT NULL,  -- which way of making request_hash
    status           text        NOT NULL   -- what is known of the execution
                     CHECK (status IN ('in_progress', 'unknown', 'completed')),
    attempt          int         NOT NULL,  -- counts executions within this id, from 1; with id the fence of every change
    owner            uuid        NOT NULL,  -- the process that works, or worked, on it (oncegate_owners)
    caller           text,                  -- who asked: verified subject, or keyed digest of the credential
    request_context  bytea,                 -- what events will need of the request; null once completed
    created_at       timestamptz NOT NULL,  -- when this id was reserved
    completed_at     timestamptz,           -- when the answer was kept
    expires_at       timestamptz,           -- when the answer's retention ends; null: does not expire
    response_status  smallint,              -- the upstream's status; not null: there is an answer
    response_headers bytea,                 -- its end-to-end headers, 'name: value' lines ended by CRLF
    response_body    bytea,                 -- its body; null beside a response_status: not retained; an empty body is ''
    PRIMARY KEY (tenant_id, operation, key)
) WITH (
    -- Room for the completed version of each row on its own page: measured, an answer of 200 bytes needs this much.
    fillfactor = 25,
    -- A row too large for its page keeps almost nothing inside it.
    toast_tuple_target = 256,
    -- Small and frequent clean-up keeps the pages as they are, however large the table is.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0
);
CREATE UNIQUE INDEX idempotency_records_id ON idempotency_records (id);
-- Lists, and the sweeper's candidates.
CREATE INDEX idempotency_records_created ON idempotency_records (created_at, id);
-- What a dead process left.
CREATE INDEX idempotency_records_owner ON idempotency_records (owner);
-- Operators ask by the key alone.
CREATE INDEX idempotency_records_key ON idempotency_records (key);

-- Processes and their leases. A lease that has run out is never renewed.
CREATE TABLE oncegate_owners (
    owner       uuid        PRIMARY KEY,           -- random, made at each process start and after each lapse
    lease_until timestamptz NOT NULL,              -- its records are its own until then
    started_at  timestamptz NOT NULL,              -- when it was first seen
    cleared     boolean     NOT NULL DEFAULT false -- nothing in progress names this dead owner any more
) WITH (fillfactor = 50);

-- Ids of records that were marked unknown at some time: a short list to look through, where an index on the status
-- would make every completion dearer. Whoever reads it checks the record; the sweeper removes what is outdated.
CREATE TABLE oncegate_unknown (
    id       uuid        PRIMARY KEY,  -- the record
    noted_at timestamptz NOT NULL      -- when it was marked last
);

-- What was done by hand, or came too late to be kept.
CREATE TABLE audit_log (
    id        uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when
    who       text        NOT NULL,                            -- the operator
    action    text        NOT NULL,                            -- record.release, record.complete, event.redeliver, late_outcome
    record_id uuid,                                            -- to which record
    event_id  uuid,                                            -- to which event
    why       text,                                            -- in the operator's words
    detail    text                                             -- more, as JSON
);
CREATE INDEX audit_log_record ON audit_log (record_id, at);
CREATE INDEX audit_log_at ON audit_log (at);

-- One row: what is true of this database as a whole.
CREATE TABLE oncegate_meta (
    only_row    boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    database_id uuid    NOT NULL DEFAULT gen_random_uuid()  -- by which a replica's spill knows its database again
);
INSERT INTO oncegate_meta DEFAULT VALUES;

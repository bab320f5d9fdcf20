-- What went wrong with a delivery, attempt by attempt. Nothing is written here while deliveries succeed.
CREATE TABLE outbox_attempts (
    event_id uuid        NOT NULL,
    sink     text        COLLATE "C" NOT NULL,
    slot     smallint    NOT NULL,  -- claim_no modulo 50: a ring, in which the newest attempt takes the place of the oldest
    claim_no int         NOT NULL,  -- grows over all attempts, also over a redelivery
    attempt  int         NOT NULL,  -- counts anew after a redelivery
    at       timestamptz NOT NULL,  -- when it ended
    status   int,                   -- the sink's status, where there was one
    error    text,                  -- what went wrong; null: the sink took it, and the event was redelivered since
    PRIMARY KEY (event_id, sink, slot)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02
);

-- How each sink stands, for all replicas alike: whether it is paused, why and since when, and who probes it.

-- A sink without a row has never been paused.
CREATE TABLE outbox_sinks (
    sink          text        COLLATE "C" PRIMARY KEY,
    pause_no      bigint      NOT NULL,            -- fence: grows with each change of the row
    pause_reason  text        CHECK (pause_reason IN ('failing', 'busy', 'gone', 'operator')),  -- null: not paused
    since         timestamptz NOT NULL,            -- when it was paused, or resumed
    probe_at      timestamptz,                     -- not probed before; null: not probed
    prober        uuid,                            -- who probes it now (oncegate_owners) ...
    probing_until timestamptz,                     -- ... and until when at most
    failed_probes int         NOT NULL DEFAULT 0,  -- in a row
    last_error    text,                            -- what paused it, or what its last failed probe met
    note          text                             -- the words of the operator who paused it
);

-- How often the sink refused this very event (400, 413, 415, 422).
ALTER TABLE outbox_queue ADD COLUMN refusals int NOT NULL DEFAULT 0;

-- Order within an ordering key, and vacuum settings of the outbox.

-- Whose turn it is: the event of an ordering key that is claimed, towards a sink that asks for order. At most one for each
-- key, whoever claims; it goes with the claim's verdict. Followers are put off only under a lock of this row, which the
-- verdict needs too: so whoever is put off is seen by the verdict that wakes the next.
CREATE TABLE outbox_turns (
    sink         text        COLLATE "C" NOT NULL,
    ordering_key text        NOT NULL,
    event_id     uuid        NOT NULL,
    lease_until  timestamptz NOT NULL,  -- as of the claim; 'infinity': the event is dead and those behind it wait
    claimed_by   uuid,                  -- the process that claimed it; null: it is dead
    PRIMARY KEY (sink, ordering_key)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);

-- Rows come once and go once, by the sweep. A fifth of a large table, as is usual, would be too much to leave behind it.
ALTER TABLE outbox_messages SET (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.05);
ALTER TABLE outbox_done SET (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.05);

-- Which events something was done to that was done to very many at once: so the life of each of their records tells of it. Goes
-- with the event.
CREATE TABLE audit_events (
    event_id uuid NOT NULL,
    sink     text COLLATE "C" NOT NULL,
    audit_id uuid NOT NULL,  -- the row of audit_log that says what, who, when and why
    PRIMARY KEY (event_id, sink, audit_id)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02
);

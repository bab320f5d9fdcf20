-- Which events something was done to that was done to very many at once: so the life of each of their records tells of it. Goes
-- with the event. The same table as on Postgres.
CREATE TABLE audit_events (
  event_id TEXT NOT NULL REFERENCES outbox_messages (id),
  sink     TEXT NOT NULL,
  audit_id TEXT NOT NULL,  -- the row of audit_log that says what, who, when and why
  PRIMARY KEY (event_id, sink, audit_id)
) WITHOUT ROWID;

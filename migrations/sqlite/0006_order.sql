-- Order within an ordering key: the same table and index as on Postgres.

-- Whose turn it is: the event of an ordering key that is claimed, towards a sink that asks for order.
CREATE TABLE outbox_turns (
  sink         TEXT NOT NULL,
  ordering_key TEXT NOT NULL,
  event_id     TEXT NOT NULL,
  lease_until  INTEGER,        -- as of the claim; NULL: the event is dead and those behind it wait
  claimed_by   TEXT,           -- the process that claimed it; NULL: it is dead
  PRIMARY KEY (sink, ordering_key)
) WITHOUT ROWID;
CREATE INDEX outbox_queue_order ON outbox_queue (sink, ordering_key, created_at, seq, event_id)
  WHERE ordering_key IS NOT NULL;

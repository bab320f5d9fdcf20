-- What went wrong with a delivery, attempt by attempt. Nothing is written here while deliveries succeed.
CREATE TABLE outbox_attempts (
  event_id TEXT NOT NULL REFERENCES outbox_messages (id),
  sink     TEXT NOT NULL,
  slot     INTEGER NOT NULL,  -- claim_no modulo 50: a ring, in which the newest attempt takes the place of the oldest
  claim_no INTEGER NOT NULL,  -- grows over all attempts, also over a redelivery
  attempt  INTEGER NOT NULL,  -- counts anew after a redelivery
  at       INTEGER NOT NULL,  -- when it ended
  status   INTEGER,           -- the sink's status, where there was one
  error    TEXT,              -- what went wrong; null: the sink took it, and the event was redelivered since
  PRIMARY KEY (event_id, sink, slot)
) WITHOUT ROWID;

-- How each sink stands: whether it is paused, why and since when, and who probes it. The same table as on Postgres.
-- A sink without a row has never been paused.
CREATE TABLE outbox_sinks (
  sink          TEXT NOT NULL PRIMARY KEY,
  pause_no      INTEGER NOT NULL,            -- fence: grows with each change of the row
  pause_reason  TEXT CHECK (pause_reason IN ('failing', 'busy', 'gone', 'operator')),  -- NULL: not paused
  since         INTEGER NOT NULL,            -- when it was paused, or resumed
  probe_at      INTEGER,                     -- not probed before; NULL: not probed
  prober        TEXT,                        -- who probes it now (oncegate_owners) ...
  probing_until INTEGER,                     -- ... and until when at most
  failed_probes INTEGER NOT NULL DEFAULT 0,  -- in a row
  last_error    TEXT,                        -- what paused it, or what its last failed probe met
  note          TEXT                         -- the words of the operator who paused it
) WITHOUT ROWID;
-- How often the sink refused this very event (400, 413, 415, 422).
ALTER TABLE outbox_queue ADD COLUMN refusals INTEGER NOT NULL DEFAULT 0;

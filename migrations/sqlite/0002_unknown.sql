-- What is known of records that were unknown at some time: since when, and how often the upstream was asked about
-- them. Whoever reads a row checks the record; the sweeper removes what is outdated. The same as on Postgres.
CREATE TABLE oncegate_unknown (
  id          TEXT NOT NULL PRIMARY KEY,   -- the record
  noted_at    INTEGER NOT NULL,            -- when it was marked last
  attempt     INTEGER NOT NULL,            -- the attempt that is unknown
  since       INTEGER NOT NULL,            -- when it became unknown; of a dead owner: its lease's end
  orphaned    INTEGER NOT NULL DEFAULT 0,  -- its owner died: the upstream may have gone on working from since on
  asked       INTEGER NOT NULL DEFAULT 0,  -- questions in a row that brought no result
  next_ask_at INTEGER NOT NULL,            -- it is not asked about again before
  announced   INTEGER                      -- the attempt that was last announced as unknown; NULL: none was
) WITHOUT ROWID;

INSERT INTO oncegate_unknown (id, noted_at, attempt, since, next_ask_at)
SELECT r.id, t.now, r.attempt, t.now, t.now
FROM idempotency_records r
CROSS JOIN (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) t
WHERE r.status <> 'completed' AND r.status = 'unknown';

-- What is known of records whose outcome is unknown: since when, and how often the upstream was asked about them.
-- Each new column has a default, so that a replica of the version before can go on noting while it still runs.
ALTER TABLE oncegate_unknown
    ADD COLUMN attempt     int         NOT NULL DEFAULT 0,  -- the attempt that is unknown; 0: noted by a version that did not say
    ADD COLUMN since       timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when it became unknown; of a dead owner: its lease's end
    ADD COLUMN orphaned    boolean     NOT NULL DEFAULT false,  -- its owner died: the upstream may have gone on working from since on
    ADD COLUMN asked       int         NOT NULL DEFAULT 0,  -- questions in a row that brought no result
    ADD COLUMN next_ask_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- it is not asked about again before
    ADD COLUMN announced   int;                             -- the attempt that was last announced as unknown; null: none was

UPDATE oncegate_unknown u
SET attempt = r.attempt, since = u.noted_at, next_ask_at = u.noted_at
FROM idempotency_records r
WHERE r.id = u.id AND r.status = 'unknown';

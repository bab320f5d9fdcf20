-- Records, leases, outbox and audit: the same tables and names as on Postgres.
-- Ids are TEXT (UUIDs as people write them). Times are INTEGER microseconds since 1970, UTC.

CREATE TABLE idempotency_records (
  id               TEXT NOT NULL,     -- made by the gateway; new for every new request, also one that takes over an expired row
  tenant_id        TEXT NOT NULL,     -- whose key
  operation        TEXT NOT NULL,     -- for which operation
  key              TEXT NOT NULL,     -- the idempotency key
  request_hash     BLOB NOT NULL,     -- SHA-256 of the canonical request
  raw_hash         BLOB NOT NULL,     -- SHA-256 of the request as received
  recipe           BLOB NOT NULL,     -- which settings made request_hash
  status           TEXT NOT NULL CHECK (status IN ('in_progress', 'unknown', 'completed')),
  attempt          INTEGER NOT NULL,  -- counts executions within one id, from 1
  owner            TEXT NOT NULL,     -- the process that works, or worked, on it
  caller           TEXT,              -- who asked: verified subject or keyed digest of the credential
  request_context  BLOB,              -- what events will need of the request; NULL once completed
  created_at       INTEGER NOT NULL,  -- when it was reserved
  completed_at     INTEGER,           -- when its answer was stored
  expires_at       INTEGER,           -- when its retention ends
  response_status  INTEGER,           -- of the stored answer
  response_headers BLOB,              -- "name: value" lines ended by CRLF
  response_body    BLOB,              -- exact bytes; NULL beside a response_status: not retained
  PRIMARY KEY (tenant_id, operation, key)
);
CREATE UNIQUE INDEX idempotency_records_id ON idempotency_records (id);
CREATE INDEX idempotency_records_created ON idempotency_records (created_at, id);
-- What the sweeper deletes.
CREATE INDEX idempotency_records_expiry ON idempotency_records (expires_at) WHERE status = 'completed';
-- What may have lost its owner, and what operators look for: a few rows.
CREATE INDEX idempotency_records_open ON idempotency_records (status, owner) WHERE status <> 'completed';

CREATE TABLE oncegate_owners (
  owner       TEXT NOT NULL PRIMARY KEY,  -- a random id, made at each process start
  lease_until INTEGER NOT NULL            -- alive until then; never renewed once over
) WITHOUT ROWID;

CREATE TABLE outbox_messages (        -- what is announced; written once, never updated
  id              TEXT NOT NULL PRIMARY KEY,  -- made from event_key: the same in every delivery
  event_key       TEXT NOT NULL UNIQUE,       -- record id, event name and element
  seq             INTEGER NOT NULL,           -- position inside its record
  event_type      TEXT NOT NULL,              -- order.created, say
  tenant_id       TEXT NOT NULL,
  operation       TEXT NOT NULL,
  idempotency_key TEXT NOT NULL,
  record_id       TEXT NOT NULL,
  ordering_key    TEXT,                       -- events with equal ones may be delivered in order
  content_type    TEXT NOT NULL DEFAULT 'application/json',
  payload         BLOB NOT NULL,              -- exactly the bytes that are sent and signed
  created_at      INTEGER NOT NULL
);
CREATE INDEX outbox_messages_lookup ON outbox_messages (idempotency_key, tenant_id);
CREATE INDEX outbox_messages_record ON outbox_messages (record_id);
CREATE INDEX outbox_messages_created ON outbox_messages (created_at, id);

CREATE TABLE outbox_queue (           -- a row stands only while a delivery is owed
  event_id        TEXT NOT NULL REFERENCES outbox_messages (id),
  sink            TEXT NOT NULL,
  lane            INTEGER NOT NULL DEFAULT 0,  -- 0 fresh, 1 retry or redelivery
  next_attempt_at INTEGER NOT NULL,            -- due from then on
  lease_until     INTEGER NOT NULL DEFAULT 0,  -- claimed until then
  claim_no        INTEGER NOT NULL DEFAULT 0,  -- fence: grows with each claim, never goes back
  attempts        INTEGER NOT NULL DEFAULT 0,  -- attempts that finished and failed
  ordering_key    TEXT,
  seq             INTEGER NOT NULL,
  created_at      INTEGER NOT NULL,
  last_status     INTEGER,                     -- of the sink's last answer
  last_error      TEXT,                        -- what went wrong last
  PRIMARY KEY (event_id, sink)
) WITHOUT ROWID;
CREATE INDEX outbox_queue_due ON outbox_queue (sink, lane, next_attempt_at, event_id);
CREATE INDEX outbox_queue_leased ON outbox_queue (sink, lease_until) WHERE lease_until > 0;

CREATE TABLE outbox_done (            -- deliveries that ended
  event_id    TEXT NOT NULL REFERENCES outbox_messages (id),
  sink        TEXT NOT NULL,          -- '' beside 'discarded': no sink wanted it
  outcome     TEXT NOT NULL CHECK (outcome IN ('sent', 'dead', 'discarded')),
  claim_no    INTEGER NOT NULL,       -- a redelivery goes on from here
  attempts    INTEGER NOT NULL,
  last_status INTEGER,
  last_error  TEXT,
  finished_at INTEGER NOT NULL,
  PRIMARY KEY (event_id, sink)
) WITHOUT ROWID;
CREATE INDEX outbox_done_dead ON outbox_done (sink, finished_at, event_id) WHERE outcome = 'dead';
CREATE INDEX outbox_done_finished ON outbox_done (finished_at) WHERE outcome <> 'dead';

CREATE VIEW outbox_events AS          -- each event towards each of its sinks
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       q.sink, m.ordering_key, m.payload, 'pending' AS status, q.attempts, q.next_attempt_at,
       q.last_error, m.created_at, NULL AS sent_at
  FROM outbox_messages m JOIN outbox_queue q ON q.event_id = m.id
UNION ALL
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       d.sink, m.ordering_key, m.payload, d.outcome, d.attempts, NULL,
       d.last_error, m.created_at, CASE WHEN d.outcome = 'sent' THEN d.finished_at END
  FROM outbox_messages m JOIN outbox_done d ON d.event_id = m.id;

CREATE TABLE audit_log (              -- what was done by hand, and late outcomes
  id        TEXT NOT NULL PRIMARY KEY,
  at        INTEGER NOT NULL,
  who       TEXT NOT NULL,            -- the operator
  action    TEXT NOT NULL,            -- record.release, record.complete, event.redeliver, late_outcome
  record_id TEXT,
  event_id  TEXT,
  why       TEXT,                     -- in the operator's words
  detail    TEXT                      -- more, as JSON
);
CREATE INDEX audit_log_at ON audit_log (at);
CREATE INDEX audit_log_record ON audit_log (record_id) WHERE record_id IS NOT NULL;

-- One row: what is true of this database as a whole.
CREATE TABLE oncegate_meta (
  only_row    INTEGER NOT NULL PRIMARY KEY DEFAULT 1 CHECK (only_row = 1),
  database_id TEXT NOT NULL           -- random: nothing kept beside it is ever written into another database
);
INSERT INTO oncegate_meta (database_id) VALUES (lower(hex(randomblob(16))));

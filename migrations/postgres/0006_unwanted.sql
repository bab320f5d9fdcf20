-- An event that no sink wants is a mark on its message, where it was a row beside it: a first request writes less.

ALTER TABLE outbox_messages
    ADD COLUMN wanted boolean NOT NULL DEFAULT true;  -- false: no sink wanted it; nothing is owed, no other row stands
-- What the sweeper deletes of them.
CREATE INDEX outbox_messages_unwanted ON outbox_messages (created_at) WHERE NOT wanted;

CREATE OR REPLACE VIEW outbox_events AS
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       q.sink, m.ordering_key, m.payload, 'pending'::text AS status, q.attempts,
       q.next_attempt_at, q.last_error, m.created_at, NULL::timestamptz AS sent_at
FROM outbox_queue q JOIN outbox_messages m ON m.id = q.event_id
UNION ALL
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       d.sink, m.ordering_key, m.payload, d.outcome AS status, d.attempts,
       NULL::timestamptz AS next_attempt_at, d.last_error, m.created_at,
       CASE WHEN d.outcome = 'sent' THEN d.finished_at END AS sent_at
FROM outbox_done d JOIN outbox_messages m ON m.id = d.event_id
UNION ALL
SELECT m.id, m.event_key, m.event_type, m.tenant_id, m.operation, m.idempotency_key, m.record_id,
       ''::text AS sink, m.ordering_key, m.payload, 'discarded'::text AS status, 0 AS attempts,
       NULL::timestamptz AS next_attempt_at, NULL::text AS last_error, m.created_at,
       NULL::timestamptz AS sent_at
FROM outbox_messages m WHERE NOT m.wanted;

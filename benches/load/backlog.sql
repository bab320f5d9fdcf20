-- A backlog of events of one kilobyte, owed to one sink.
insert into outbox_messages (id, event_key, seq, event_type, tenant_id, operation, idempotency_key, record_id, payload,
                             created_at)
select gen_random_uuid(), n || '/order.created', 0, 'order.created', 'acme', 'orders.create', 'k-' || n,
       gen_random_uuid(), convert_to('{"type":"order.created","data":"' || repeat('x', 990) || '"}', 'UTF8'),
       clock_timestamp() - interval '5 seconds'
from generate_series(1, :events) n;
insert into outbox_queue (event_id, sink, next_attempt_at, created_at)
select id, 'main', created_at, created_at from outbox_messages;
checkpoint;

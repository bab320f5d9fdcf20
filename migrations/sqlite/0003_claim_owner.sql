-- Whose claim it is (oncegate_owners): a claim of a process whose own lease has ended is free at once.
ALTER TABLE outbox_queue ADD COLUMN claimed_by TEXT;

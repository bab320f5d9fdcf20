-- Whose claim it is: a claim of a process whose own lease has ended is free at once.

-- Null: never claimed, or claimed by a version that did not say by whom: free when its lease ends. Not indexed: a
-- claim changes no indexed column.
ALTER TABLE outbox_queue ADD COLUMN claimed_by uuid;

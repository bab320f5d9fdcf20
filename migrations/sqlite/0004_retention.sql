-- How long the answer will be kept, from its completion on, in microseconds: the same column as on Postgres, written at
-- the reservation. NULL: reserved by a program that did not know this column.
ALTER TABLE idempotency_records ADD COLUMN retention INTEGER;

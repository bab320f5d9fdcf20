-- The relay's statements as it runs them, with the answer of each claim folded into one row for the acknowledgement.
begin isolation level read committed;
select coalesce(array_agg(event_id order by event_id), '{}')::text as ids,
       coalesce(array_agg(claim_no order by event_id), '{}')::text as claims,
       coalesce(sum(length(payload)), 0) as bytes
from oncegate_claim('main', 0::smallint, :batch, 35, 3e9, '00000000-0000-4000-8000-000000000000', true, null) \gset
commit;
select count(*)
from oncegate_finish('main', (:ids)::uuid[], (:claims)::int[], array_fill('sent'::text, array[cardinality((:ids)::uuid[])]),
                     array_fill(204, array[cardinality((:ids)::uuid[])]),
                     array_fill(null::text, array[cardinality((:ids)::uuid[])])) \gset gone_

-- The functions that an application calls look rows up by index, or read the small table of sinks, which has none to read it
-- by. Where sequential scans are off, that reading looks as dear as nothing else, and the server compiles the query (jit) in
-- each session anew: a tenth of a second or more, for less than a millisecond's work.
ALTER FUNCTION oncegate_complete(uuid, int, int, text, bytea) SET jit = off;
ALTER FUNCTION oncegate_emit(uuid, text, text, jsonb) SET jit = off;
ALTER FUNCTION oncegate_at_commit() SET jit = off;
ALTER FUNCTION oncegate_reserve_batch(uuid[], text[], text[], text[], bytea[], bytea[], bytea[],
                                      uuid[], text[], bytea[], float8[]) SET jit = off;
ALTER FUNCTION oncegate_complete_batch(uuid[], int[], text[], text[], text[], int[], bytea[],
                                       bytea[], float8[], uuid[], uuid[], text[], int[], text[],
                                       text[], bytea[], bool[], uuid[], text[]) SET jit = off;

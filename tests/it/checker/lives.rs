//! The times of records by the database's own clock, written down by triggers: of what has expired nothing else is left.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{Clock, Life, Row};
use super::{hex, row_of, text};
use crate::support::rig::{Place, Which};

const ON_POSTGRES: &str = "
create table checker_lives (seq bigserial, what text, at timestamptz, expires_at timestamptz,
    tenant_id text, operation text, key text, id uuid, attempt int, status text,
    response_status int, response_headers bytea, response_body bytea);
create function checker_note(what text, at timestamptz, r idempotency_records) returns void
language sql as $$
    insert into checker_lives (what, at, expires_at, tenant_id, operation, key, id, attempt, status,
                               response_status, response_headers, response_body)
    values (what, at, r.expires_at, r.tenant_id, r.operation, r.key, r.id, r.attempt, r.status,
            r.response_status, r.response_headers, r.response_body) $$;
create function checker_look() returns trigger language plpgsql as $$
begin
    -- Tries whether writes work, which nobody sees, have no tenant.
    if coalesce(new.tenant_id, old.tenant_id) = '' then
        return null;
    end if;
    if tg_op = 'DELETE' then
        perform checker_note('gone', clock_timestamp(), old);
        return null;
    end if;
    if tg_op = 'UPDATE' and old.id <> new.id then
        perform checker_note('gone', new.created_at, old);
    end if;
    if tg_op = 'INSERT' or old.id <> new.id then
        perform checker_note('made', new.created_at, new);
    end if;
    if tg_op = 'UPDATE' and new.status = 'completed' and old.status <> 'completed' then
        perform checker_note('completed', new.completed_at, new);
    end if;
    return null;
end $$;
create trigger checker_look after insert or update or delete on idempotency_records
    for each row execute function checker_look();";

/// Notes what was done to a row, which is called `old` or `new` in the trigger.
fn on_sqlite(name: &str, when: &str, what: &str, row: &str, at: &str) -> String {
    format!(
        "create trigger checker_{name} after {when} begin
         insert into checker_lives (what, at, expires_at, tenant_id, operation, key, id, attempt, status,
                                    response_status, response_headers, response_body)
         values ('{what}', {at}, {row}.expires_at, {row}.tenant_id, {row}.operation, {row}.key, {row}.id,
                 {row}.attempt, {row}.status, {row}.response_status, {row}.response_headers,
                 {row}.response_body);
         end"
    )
}

/// From now on the lives of records are written down.
pub(crate) async fn watch(place: &Place, which: Which) {
    if which == Which::Postgres {
        place.rows(ON_POSTGRES).await;
        return;
    }
    let table = "create table checker_lives (seq integer primary key, what text, at integer,
        expires_at integer, tenant_id text, operation text, key text, id text, attempt integer,
        status text, response_status integer, response_headers blob, response_body blob)";
    place.rows(table).await;
    let now = sqlite_now();
    let taken = "update on idempotency_records when old.id <> new.id";
    let completed = "update on idempotency_records
        when new.status = 'completed' and old.status <> 'completed'";
    for sql in [
        on_sqlite("made", "insert on idempotency_records", "made", "new", "new.created_at"),
        on_sqlite("gone", "delete on idempotency_records", "gone", "old", now),
        on_sqlite("left", taken, "gone", "old", "new.created_at"),
        on_sqlite("took", taken, "made", "new", "new.created_at"),
        on_sqlite("completed", completed, "completed", "new", "new.completed_at"),
    ] {
        place.rows(&sql).await;
    }
}

fn sqlite_now() -> &'static str {
    "cast(round(unixepoch('subsec') * 1000) as integer) * 1000"
}

/// A time as microseconds, in a store's words.
fn micros(which: Which, time: &str) -> String {
    match which {
        Which::Sqlite => format!("cast({time} as integer)"),
        Which::Postgres => format!("(extract(epoch from {time}) * 1000000)::bigint"),
    }
}

/// When the run began, by the database's clock: as the quickest of some looks at it says.
async fn began(place: &Place, which: Which, clock: Clock) -> i64 {
    let now = match which {
        Which::Sqlite => sqlite_now(),
        Which::Postgres => "clock_timestamp()",
    };
    let (sql, mut looks) = (format!("select {}", micros(which, now)), Vec::new());
    for _ in 0..5 {
        let before = clock.now() as i64;
        let now = place.count(&sql).await;
        let after = clock.now() as i64;
        looks.push((after - before, now - i64::midpoint(before, after)));
    }
    looks.into_iter().min().expect("a look").1
}

/// The lives of records by their ids, and the rows that are gone by now.
pub(crate) async fn read(
    place: &Place,
    which: Which,
    clock: Clock,
    rows: &[Row],
) -> (BTreeMap<String, Life>, Vec<Row>) {
    let began = began(place, which, clock).await;
    let sql = format!(
        "select tenant_id, operation, key, id, attempt, status, response_status, {}, {}, what, {}, {}
         from checker_lives order by seq",
        hex(which, "response_headers"),
        hex(which, "response_body"),
        micros(which, "at"),
        micros(which, "expires_at"),
    );
    let there: BTreeSet<&str> = rows.iter().map(|row| row.record.as_str()).collect();
    let (mut lives, mut past) = (BTreeMap::<String, Life>::new(), Vec::new());
    for cells in place.rows(&sql).await {
        let row = row_of(&cells);
        let time = |n: usize| cells[n].as_ref().map(|t| t.parse::<i64>().expect("a time") - began);
        let life = lives.entry(row.record.clone()).or_default();
        match text(&cells, 9).as_str() {
            "made" => life.made = time(10).expect("a time"),
            "gone" => life.gone = time(10),
            _ => {
                life.expires = time(11);
                if !there.contains(row.record.as_str()) {
                    past.push(row);
                }
            }
        }
    }
    (lives, past)
}

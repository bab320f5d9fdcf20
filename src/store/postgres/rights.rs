//! Which rights the role lacks, and which tables are missing: told before a request finds it out.

use tokio_postgres::Row;

use super::pool::Pool;
use super::rows::get;
use crate::store::Error;

const READS: &[&str] = &["SELECT"];
const KEEPS: &[&str] = &["SELECT", "INSERT", "UPDATE"];
const REWRITES: &[&str] = &["SELECT", "INSERT", "DELETE"];
const ALL: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];

/// What `serve` does with each table.
const NEEDED: &[(&str, &[&str])] = &[
    ("audit_events", REWRITES),
    ("audit_log", KEEPS),
    ("idempotency_records", ALL),
    ("oncegate_meta", READS),
    ("oncegate_migrations", READS),
    ("oncegate_owners", ALL),
    ("oncegate_sinks", ALL),
    ("oncegate_unknown", ALL),
    ("outbox_attempts", ALL),
    ("outbox_done", ALL),
    ("outbox_messages", ALL),
    ("outbox_queue", ALL),
    ("outbox_sinks", KEEPS),
    ("outbox_turns", ALL),
];

const LACKING: &str = "-- lacking
SELECT n.tab, n.need, to_regclass(n.tab) IS NULL AS missing, current_user::text AS role
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS n(tab, need, place)
WHERE to_regclass(n.tab) IS NULL OR NOT has_table_privilege(to_regclass(n.tab)::oid, n.need)
ORDER BY n.place";

/// A line for each table with which the role cannot do what `serve` does; none: it has all rights.
pub(super) async fn lacking(pool: &Pool) -> Result<Vec<String>, Error> {
    let needed =
        NEEDED.iter().flat_map(|(table, rights)| rights.iter().map(|right| (*table, *right)));
    let (tables, rights): (Vec<&str>, Vec<&str>) = needed.unzip();
    let rows = pool.read(LACKING, &[&tables, &rights]).await?;
    let mut lacking: Vec<Lacking> = Vec::new();
    for row in &rows {
        let one = Lacking::of(row)?;
        match lacking.last_mut() {
            Some(last) if last.table == one.table => last.rights.extend(one.rights),
            Some(_) | None => lacking.push(one),
        }
    }
    Ok(lacking.iter().map(Lacking::text).collect())
}

/// What the role cannot do with a table.
struct Lacking {
    table: String,
    rights: Vec<String>,
    missing: bool,
    role: String,
}

impl Lacking {
    fn of(row: &Row) -> Result<Self, Error> {
        let rights = vec![get(row, "need")?];
        Ok(Self {
            table: get(row, "tab")?,
            rights,
            missing: get(row, "missing")?,
            role: get(row, "role")?,
        })
    }

    fn text(&self) -> String {
        let Self { table, rights, missing, role } = self;
        let rights = rights.join(", ");
        match missing {
            true => format!(
                "the table {table} is not there, although the schema's version says so: put it back, from a backup say"
            ),
            false => format!(
                "the role {role:?} may not {rights} on the table {table}: GRANT {rights} ON {table} TO {role:?}"
            ),
        }
    }
}

const MAY_MAKE: &str = "-- may_make
SELECT current_user::text AS role, current_schema()::text AS schema,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may";

/// Why the role cannot make tables; none: it can.
pub(super) async fn makes_no_tables(pool: &Pool) -> Result<Option<String>, Error> {
    let rows = pool.read(MAY_MAKE, &[]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let (role, schema): (String, Option<String>) = (get(row, "role")?, get(row, "schema")?);
    Ok(match (get(row, "may")?, schema) {
        (true, _) => None,
        (false, Some(schema)) => Some(format!(
            "the role {role:?} may not CREATE in the schema {schema:?}, where its tables are to be made: GRANT CREATE ON SCHEMA \
             {schema:?} TO {role:?}, or let another role run `oncegate migrate`"
        )),
        (false, None) => Some(format!(
            "the role {role:?} may use none of the schemas in its search_path: GRANT USAGE, CREATE ON SCHEMA public TO {role:?}, \
             or set another search_path"
        )),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// All SQL of this store.
    fn sql() -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut all = String::new();
        for within in ["src/store/postgres", "migrations/postgres"] {
            for entry in std::fs::read_dir(folder.join(within)).unwrap() {
                let path = entry.unwrap().path();
                if !path.ends_with("rights.rs") {
                    all.push_str(&std::fs::read_to_string(path).unwrap());
                }
            }
        }
        all
    }

    #[test]
    fn what_is_done_to_a_table_is_asked_for_as_a_right() {
        let sql = sql();
        let tables = sql.split("CREATE TABLE ").skip(1).map(|rest| {
            let rest = rest.trim_start_matches("IF NOT EXISTS ");
            rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap()
        });
        for table in tables {
            let (_, rights) = NEEDED.iter().find(|(name, _)| *name == table).expect(table);
            // What is written by a migration is the business of who migrates.
            if table == "oncegate_migrations" || table == "oncegate_meta" {
                continue;
            }
            for (statement, right) in
                [("INSERT INTO", "INSERT"), ("UPDATE", "UPDATE"), ("DELETE FROM", "DELETE")]
            {
                let done = [" ", "\n"]
                    .iter()
                    .any(|end| sql.contains(&format!("{statement} {table}{end}")));
                assert!(!done || rights.contains(&right), "{right} on {table}");
            }
        }
    }
}

//! The schema: embedded, versioned, brought up to date in one transaction.
//!
//! Several replicas may start at once: the version table's lock lets one migrate and the others find it done. When
//! the process dies in the middle, the transaction is rolled back and the schema is as it was. Released files never
//! change; a change is a new file.

use std::cmp::Ordering;

use tokio_postgres::Row;
use tokio_postgres::error::SqlState;

use super::connection::{Connection, Effect, Transaction};
use super::refusal;
use crate::fault::{self, Point};
use crate::store::batch::RunError;
use crate::store::{Cause, Error, OpenError};

struct Migration {
    version: u32,
    name: &'static str,
    sql: &'static str,
}

/// Each by its version, its name, and its file.
macro_rules! migrations {
    ($($version:literal, $name:literal, $file:literal;)*) => {
        &[$(Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../../../migrations/postgres/", $file)),
        }),*]
    };
}

/// In the order of their versions.
const MIGRATIONS: &[Migration] = migrations! {
    1, "records", "0001_records.sql";
    2, "outbox", "0002_outbox.sql";
    3, "unknown", "0003_unknown.sql";
    4, "functions", "0004_functions.sql";
    5, "claim_owner", "0005_claim_owner.sql";
    6, "unwanted", "0006_unwanted.sql";
    7, "batches", "0007_batches.sql";
    8, "sinks", "0008_sinks.sql";
    9, "order", "0009_order.sql";
    10, "attempts", "0010_attempts.sql";
    11, "event_filters", "0011_event_filters.sql";
    12, "audit_events", "0012_audit_events.sql";
    13, "relay", "0013_relay.sql";
    14, "no_jit", "0014_no_jit.sql";
    15, "wake", "0015_wake.sql";
};

/// The version that this program knows.
fn known() -> u32 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

const HAS_TABLE: &str = "-- has_migrations\nSELECT to_regclass('oncegate_migrations') IS NOT NULL";

const MAKE_TABLE: &str = "
CREATE TABLE IF NOT EXISTS oncegate_migrations (
    version    int         PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)";

const VERSION: &str =
    "-- schema_version\nSELECT coalesce(max(version), 0) FROM oncegate_migrations";

const NOTE: &str =
    "-- note_migration\nINSERT INTO oncegate_migrations (version, name) VALUES ($1, $2)";

/// How long a migration waits for a table that somebody uses. All who come to the table after it wait behind it: the replicas
/// that serve, too.
const LOCKS: &str = "-- migration_locks\nSET LOCAL lock_timeout = '5s'";

/// How often the version table is tried again while another replica makes it.
const TABLE_TRIES: u32 = 50;

const ENCODING: &str = "-- encoding\nSELECT current_setting('server_encoding')";

/// The encoding of the database where it is another one than UTF-8.
pub(super) async fn wrong_encoding(connection: &mut Connection) -> Result<Option<String>, Error> {
    let rows = connection.run(Effect::Read, ENCODING, &[]).await.map_err(RunError::into_error)?;
    let encoding: String = match rows.first() {
        Some(row) => row.try_get(0).map_err(|error| Error::Unreadable(error.into()))?,
        None => String::new(),
    };
    Ok((encoding != "UTF8").then_some(encoding))
}

/// How a schema is to this program that may be used, or be made so.
pub(super) enum Schema {
    /// It is the program's.
    Current(u32),
    /// It is older, down to none.
    Older(u32),
}

/// Which schema there is.
pub(super) async fn look(connection: &mut Connection, allowed: bool) -> Result<Schema, OpenError> {
    let found = version(connection).await.map_err(unread)?;
    match found.cmp(&known()) {
        Ordering::Greater => Err(OpenError::NewerSchema { found, known: known() }),
        Ordering::Equal => Ok(Schema::Current(found)),
        Ordering::Less if allowed => Ok(Schema::Older(found)),
        Ordering::Less => Err(OpenError::OlderSchema { found, known: known() }),
    }
}

/// Brings a schema up that was at the version `found`.
pub(super) async fn migrate(connection: &mut Connection, found: u32) -> Result<u32, OpenError> {
    make_table(connection).await?;
    let mut at = found;
    match bring_up(connection, &mut at).await {
        Ok(found) if found > known() => Err(OpenError::NewerSchema { found, known: known() }),
        Ok(_) => Ok(known()),
        Err(error) => Err(broken(at, error)),
    }
}

/// Applies what is missing, once it is this replica's turn. The version that it found; `at` tells where it was.
async fn bring_up(connection: &mut Connection, at: &mut u32) -> Result<u32, RunError> {
    let mut transaction = connection.begin("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    transaction.plain("LOCK TABLE oncegate_migrations IN EXCLUSIVE MODE").await?;
    transaction.plain(LOCKS).await?;
    let found = version_of(&transaction.run(VERSION, &[]).await?);
    for migration in MIGRATIONS.iter().filter(|migration| migration.version > found) {
        *at = migration.version;
        apply(&mut transaction, migration).await?;
    }
    transaction.commit().await?;
    Ok(found)
}

async fn apply(transaction: &mut Transaction<'_>, migration: &Migration) -> Result<(), RunError> {
    transaction.plain(migration.sql).await?;
    fault::point(Point::Migrating).await;
    let version = i32::try_from(migration.version).unwrap_or(i32::MAX);
    transaction.run(NOTE, &[&version, &migration.name]).await?;
    tracing::info!(version, name = migration.name, "migrated the store");
    Ok(())
}

/// `IF NOT EXISTS` still fails where two make the table in the same moment: the loser looks again.
async fn make_table(connection: &mut Connection) -> Result<(), OpenError> {
    let mut tries = 0;
    loop {
        let error = match connection.plain(Effect::Write, MAKE_TABLE).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        tries += 1;
        if tries == TABLE_TRIES {
            return Err(broken(0, error));
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        if has_table(connection).await.map_err(|error| broken(0, error))? {
            return Ok(());
        }
    }
}

async fn has_table(connection: &mut Connection) -> Result<bool, RunError> {
    let rows = connection.run(Effect::Read, HAS_TABLE, &[]).await?;
    Ok(rows.first().is_some_and(|row| row.try_get(0).unwrap_or(false)))
}

/// The schema's version; 0: there is none.
async fn version(connection: &mut Connection) -> Result<u32, RunError> {
    if !has_table(connection).await? {
        return Ok(0);
    }
    let rows = connection.run(Effect::Read, VERSION, &[]).await?;
    Ok(version_of(&rows))
}

fn version_of(rows: &[Row]) -> u32 {
    let version: i32 = rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or(0);
    u32::try_from(version).unwrap_or(0)
}

/// The version could not be read.
fn unread(error: RunError) -> OpenError {
    match why(error) {
        (cause, true) => OpenError::Unread { cause },
        (cause, false) => OpenError::Interrupted { version: 0, cause },
    }
}

fn broken(version: u32, error: RunError) -> OpenError {
    match why(error) {
        (cause, true) => OpenError::Migration { version, cause },
        (cause, false) => {
            let cause = if waited_in_vain(&cause) { Cause::from(IN_USE) } else { cause };
            OpenError::Interrupted { version, cause }
        }
    }
}

/// Why it failed, and whether it will again.
fn why(error: RunError) -> (Cause, bool) {
    let (cause, refused): (Cause, bool) = match error.into_error() {
        Error::Unavailable(cause) | Error::InDoubt(cause) => (cause, false),
        Error::Refused(cause) | Error::Unreadable(cause) => (cause, true),
        Error::Late => ("too late".into(), false),
    };
    let lasts = refused || refusal::lasts(&cause);
    (cause, lasts)
}

const IN_USE: &str = "a table was in use for longer than 5 s, as by a dump or another long transaction; nothing was changed: \
     it goes through once that has ended (`serve` tries again by itself)";

fn waited_in_vain(cause: &Cause) -> bool {
    let error = cause.downcast_ref::<tokio_postgres::Error>();
    error.and_then(tokio_postgres::Error::code) == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

const DURABLE: &str = "-- durable
SELECT current_setting('fsync'), current_setting('synchronous_commit')";

/// A server that acknowledges commits it may lose breaks the promise of "once": said aloud at the start.
pub(super) async fn warn_of_lost_commits(connection: &mut Connection) {
    let Ok(rows) = connection.run(Effect::Read, DURABLE, &[]).await else { return };
    for (n, name) in ["fsync", "synchronous_commit"].into_iter().enumerate() {
        let value: Option<String> = rows.first().and_then(|row| row.try_get(n).ok());
        if value.as_deref() == Some("off") {
            tracing::warn!(
                "the database runs with {name} = off: a crash of it can lose what was promised"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_stand_in_the_order_of_their_versions() {
        assert!(MIGRATIONS.is_sorted_by(|one, next| one.version < next.version));
    }
}

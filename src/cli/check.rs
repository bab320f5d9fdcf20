//! `check`: prints mistakes and warnings of a configuration, and checks the store if it can be reached.
//!
//! It changes nothing: it makes no file and migrates no schema. A store that cannot be reached does not fail the check, so
//! that a file can be checked on another machine. A store that answers fails the check if `serve` could not work with it:
//! encoding, user, rights, schema, or the folder of the file.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use super::{ConfigArgs, USAGE, fail, load, names_of, say, sinks};
use crate::admin::sinks::pending_for_unconfigured;
use crate::config::{Config, StoreKind, Warning};
use crate::gateway::spill;
use crate::store::postgres::{self, Postgres};
use crate::store::sqlite::{Location, Sqlite};
use crate::store::{self, OpenError, Store};
use crate::telemetry::causes;

/// How long `check` waits for the store.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// The result of checking the store.
enum StoreCheck {
    /// The store answered. Sinks with pending events that the file does not name, and a note on what `serve` will do at its
    /// start.
    Asked { pending: Vec<(String, u64)>, note: Option<String> },
    /// The store could not be reached; why.
    NotAsked(String),
    /// `serve` could not work with this store; one reason each.
    Unusable(Vec<String>),
}

/// What to do so that `check` reaches the store.
const TO_LOOK: &str = "to check the store as well, run `check` where `serve` runs: with its configuration and variables, and where \
     it can reach the database";

pub(super) async fn check(args: &ConfigArgs) -> ExitCode {
    let (config, mut warnings) = match load(args.config.as_deref(), None) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    let checked = look(&config).await;
    // The spill's folder may be missing because the store's folder is; the check of the store then reports that.
    if !matches!(checked, StoreCheck::Unusable(_)) {
        if let Err(unwritable) = spill::probe(&config.store.spill.dir) {
            return fail(USAGE, &format!("store.spill.dir: {}", causes(&unwritable)));
        }
        if let Err(none) = config.digest_key.probe() {
            return fail(USAGE, &causes(&none));
        }
    }
    if let StoreCheck::Asked { pending, .. } = &checked {
        warnings.extend(pending.iter().map(not_named));
    }
    if args.json {
        say(&as_json(&config, &warnings, &checked).to_string());
    } else {
        tell(&config, &warnings, &checked);
    }
    let StoreCheck::Unusable(why) = &checked else { return ExitCode::SUCCESS };
    if !args.json {
        let lines: Vec<_> = why.iter().map(|why| format!("store.url: {why}")).collect();
        return fail(UNUSABLE, &lines.join("\noncegate: "));
    }
    ExitCode::from(UNUSABLE)
}

/// Exit status if the file is right and `serve` could not work with the store.
const UNUSABLE: u8 = 1;

fn tell(config: &Config, warnings: &[Warning], checked: &StoreCheck) {
    for warning in warnings {
        say(&format!("warning: {warning}"));
    }
    let keys: Vec<_> = config.store.keys.ids().collect();
    for line in protected(&keys) {
        say(&line);
    }
    let counted =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let routes = counted(config.routes.iter().count(), "route");
    let all = format!("{routes}, {}", counted(warnings.len(), "warning"));
    match checked {
        StoreCheck::Asked { note, .. } => {
            if let Some(note) = note {
                say(&format!("note: {note}"));
            }
            say(&format!("ok: {all}; the store was looked at"));
        }
        StoreCheck::NotAsked(why) => {
            say(&format!("note: the store was not looked at: {why}; {TO_LOOK}"));
            say(&format!("ok: {all}; the store was not looked at"));
        }
        StoreCheck::Unusable(_) => {}
    }
}

fn as_json(config: &Config, warnings: &[Warning], checked: &StoreCheck) -> serde_json::Value {
    let warnings: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    let store = match checked {
        StoreCheck::Asked { pending, note } => {
            let pending: Vec<_> = pending
                .iter()
                .map(|(sink, events)| json!({ "sink": sink, "events": events }))
                .collect();
            let mut store = json!({ "looked": true, "owed_to_others": pending });
            if let (Some(note), Some(fields)) = (note, store.as_object_mut()) {
                fields.insert("note".to_owned(), note.as_str().into());
            }
            store
        }
        StoreCheck::NotAsked(why) => json!({ "looked": false, "why": why }),
        StoreCheck::Unusable(why) => json!({ "looked": true, "unusable": why }),
    };
    let keys: Vec<_> = config.store.keys.ids().collect();
    json!({
        "ok": !matches!(checked, StoreCheck::Unusable(_)), "routes": config.routes.iter().count(),
        "warnings": warnings, "encryption_keys": keys, "store": store,
    })
}

fn not_named((sink, pending): &(String, u64)) -> Warning {
    let events = sinks::events(*pending);
    let text = format!(
        "{events} pending for {sink:?}, which no [[sink]] names: they are neither delivered nor deleted. Add the \
         sink again, or discard them"
    );
    Warning { location: "sink".to_owned(), text }
}

/// Asks the store whether `serve` can work with it, and which other sinks have pending events. Makes no file.
async fn look(config: &Config) -> StoreCheck {
    let asking = async {
        match &config.store.kind {
            StoreKind::Sqlite(location) => in_file(config, location).await,
            StoreKind::Postgres(postgres) => on_server(config, postgres.clone()).await,
        }
    };
    match tokio::time::timeout(LOOK_MAX, asking).await {
        Ok(Ok(checked) | Err(checked)) => checked,
        Err(_) => StoreCheck::NotAsked(format!("no answer within {} s", LOOK_MAX.as_secs())),
    }
}

async fn in_file(config: &Config, location: &Location) -> Result<StoreCheck, StoreCheck> {
    location.look().map_err(refused)?;
    if !location.path.exists() {
        let none = format!("there is no {} yet: `serve` makes it", location.path.display());
        return Err(StoreCheck::NotAsked(none));
    }
    let there = Location { create: false, ..location.clone() };
    let store = Sqlite::open(&there).await.map_err(refused)?;
    match store.migrate(false).await {
        Ok(_) => pending(&store, config).await,
        Err(older) => {
            Ok(StoreCheck::Asked { pending: Vec::new(), note: Some(to_come(config, older)?) })
        }
    }
}

async fn on_server(
    config: &Config,
    postgres: postgres::Settings,
) -> Result<StoreCheck, StoreCheck> {
    let store = Postgres::open(postgres).await.map_err(refused)?;
    let migrated = store.migrate(false).await;
    let lacking = match &migrated {
        Ok(_) => store.lacking_rights().await,
        Err(OpenError::OlderSchema { .. }) => {
            store.makes_no_tables().await.map(|why| why.into_iter().collect())
        }
        Err(_) => Ok(Vec::new()),
    };
    let lacking = lacking.map_err(not_asked)?;
    match migrated {
        Ok(_) if lacking.is_empty() => pending(&store, config).await,
        Ok(_) => Err(StoreCheck::Unusable(lacking)),
        Err(older) => {
            let note = to_come(config, older)?;
            if !lacking.is_empty() {
                return Err(StoreCheck::Unusable(lacking));
            }
            Ok(StoreCheck::Asked { pending: Vec::new(), note: Some(note) })
        }
    }
}

async fn pending(store: &dyn Store, config: &Config) -> Result<StoreCheck, StoreCheck> {
    let pending = pending_for_unconfigured(store, &names_of(config)).await.map_err(not_asked)?;
    Ok(StoreCheck::Asked { pending, note: None })
}

/// An older schema is no error if `serve` may migrate it.
fn to_come(config: &Config, error: OpenError) -> Result<String, StoreCheck> {
    let OpenError::OlderSchema { found, known } = error else { return Err(refused(error)) };
    if !config.store.migrate {
        return Err(refused(error));
    }
    Ok(match found {
        0 => {
            format!("the store is empty: `serve` makes its schema (version {known}) at its start")
        }
        found => format!(
            "the store's schema is version {found}: `serve` brings it to version {known} at its start"
        ),
    })
}

/// An error that does not pass by itself would also end `serve`.
#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn refused(error: OpenError) -> StoreCheck {
    match error.may_pass() {
        true => StoreCheck::NotAsked(causes(&error)),
        false => StoreCheck::Unusable(vec![causes(&error)]),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn not_asked(error: store::Error) -> StoreCheck {
    StoreCheck::NotAsked(causes(&error))
}

/// The lines on what is sealed at rest, and what is not.
fn protected(keys: &[&str]) -> Vec<String> {
    let Some((first, older)) = keys.split_first() else { return Vec::new() };
    let mut lines = vec![
        format!(
            "encryption: stored headers, bodies, request contexts and event payloads are sealed with the key {first:?}, in the \
             database and in the spill"
        ),
        "encryption: tenants, operations, keys, hashes, statuses and times are in the clear; so is what an application \
         writes with oncegate_complete and oncegate_emit, and what was stored before"
            .to_owned(),
    ];
    if !older.is_empty() {
        lines.push(format!("encryption: older keys that still open: {}", older.join(", ")));
    }
    lines
}

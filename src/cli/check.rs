//! `check`: what is wrong with a configuration, what is unsafe, and what the store says of it where it can be asked.
//!
//! It changes nothing: no file is made, no schema is migrated. A store that cannot be asked is no mistake of the
//! configuration, so that a file can be checked where the database is not.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use super::{ConfigArgs, USAGE, fail, load, names_of, say, sinks, start};
use crate::admin::sinks::pending_for_unconfigured;
use crate::config::{Config, StoreKind, Warning};
use crate::gateway::spill;
use crate::store::sqlite::Location;
use crate::telemetry::causes;

/// How long the store is waited for.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// What came of asking the store.
enum StoreCheck {
    /// These sinks have pending events, and the file does not name them.
    Pending(Vec<(String, u64)>),
    /// It could not be asked; why.
    NotAsked(String),
}

pub(super) async fn check(args: &ConfigArgs) -> ExitCode {
    let (config, mut warnings) = match load(args.config.as_deref(), None) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    if let Err(unwritable) = spill::probe(&config.store.spill.dir) {
        return fail(USAGE, &format!("store.spill.dir: {}", causes(&unwritable)));
    }
    let checked = look(&config).await;
    if let StoreCheck::Pending(pending) = &checked {
        warnings.extend(pending.iter().map(not_named));
    }
    if args.json {
        say(&as_json(&config, &warnings, &checked).to_string());
        return ExitCode::SUCCESS;
    }
    for warning in &warnings {
        say(&format!("warning: {warning}"));
    }
    let keys: Vec<_> = config.store.keys.ids().collect();
    for line in protected(&keys) {
        say(&line);
    }
    if let StoreCheck::NotAsked(why) = &checked {
        say(&format!("the store was not looked at: {why}"));
    }
    let counted =
        |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let routes = counted(config.routes.iter().count(), "route");
    say(&format!("ok: {routes}, {}", counted(warnings.len(), "warning")));
    ExitCode::SUCCESS
}

fn as_json(config: &Config, warnings: &[Warning], checked: &StoreCheck) -> serde_json::Value {
    let warnings: Vec<_> = warnings.iter().map(ToString::to_string).collect();
    let store = match checked {
        StoreCheck::Pending(pending) => {
            let pending: Vec<_> = pending
                .iter()
                .map(|(sink, events)| json!({ "sink": sink, "events": events }))
                .collect();
            json!({ "looked": true, "owed_to_others": pending })
        }
        StoreCheck::NotAsked(why) => json!({ "looked": false, "why": why }),
    };
    let keys: Vec<_> = config.store.keys.ids().collect();
    json!({
        "ok": true, "routes": config.routes.iter().count(), "warnings": warnings, "encryption_keys": keys,
        "store": store,
    })
}

fn not_named((sink, pending): &(String, u64)) -> Warning {
    let events = sinks::events(*pending);
    let text = format!(
        "{events} pending for {sink:?}, which no [[sink]] names: nobody delivers them, and nothing deletes them. Name it \
         again, or discard them"
    );
    Warning { location: "sink".to_owned(), text }
}

/// Asks the store which other sinks have pending events. Nothing is made for it.
async fn look(config: &Config) -> StoreCheck {
    let mut settings = config.store.clone();
    if let StoreKind::Sqlite(location) = &mut settings.kind {
        if !location.path.exists() {
            return StoreCheck::NotAsked(format!("there is no {} yet", location.path.display()));
        }
        *location = Location { create: false, ..location.clone() };
    }
    let configured = names_of(config);
    let asking = async {
        let store = start::open(&settings, false).await.map_err(|error| causes(&error))?;
        pending_for_unconfigured(&*store, &configured).await.map_err(|error| causes(&error))
    };
    match tokio::time::timeout(LOOK_MAX, asking).await {
        Ok(Ok(pending)) => StoreCheck::Pending(pending),
        Ok(Err(why)) => StoreCheck::NotAsked(why),
        Err(_) => StoreCheck::NotAsked(format!("no answer within {} s", LOOK_MAX.as_secs())),
    }
}

/// What is sealed at rest, and what is not.
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

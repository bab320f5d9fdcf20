//! The state of the sinks: one table for the command and the admin listener.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use super::query::nearest;
use super::view::time;
use crate::store::{
    self, Changed, NextProbe, Operator, PauseReason, Reclaim, SinkOrder, SinkState, Store,
};

/// The state of a sink. The field names are stable.
#[derive(Debug, Default, Serialize)]
pub struct SinkView {
    /// Its name.
    pub name: String,
    /// Whether the configuration names it. Events for a sink that is not configured stay pending.
    pub configured: bool,
    /// Whether it is paused: only probes are sent to it.
    pub paused: bool,
    /// Why it is paused: failing, busy, gone or operator.
    pub reason: Option<&'static str>,
    /// The note of the operator who paused it.
    pub note: Option<String>,
    /// Since when it is paused, or open again. `None`: it was never paused.
    pub since: Option<String>,
    /// In how many seconds it may be probed next; 0 during a probe. `None`: it is not probed. A sink that is not configured
    /// never is.
    pub next_probe_seconds: Option<u64>,
    /// Whether a probe is under way.
    pub probing: bool,
    /// Failed probes in a row.
    pub failed_probes: u32,
    /// Pending events for it.
    pub pending: u64,
    /// How old the oldest of them is, in seconds.
    pub oldest_age_seconds: u64,
    /// Dead events for it.
    pub dead: u64,
    /// The last error, also if an operator has paused the sink since.
    pub last_error: Option<String>,
}

/// All sinks.
#[derive(Debug, Serialize)]
pub struct SinkPage {
    /// Ordered by name.
    pub sinks: Vec<SinkView>,
}

/// The sinks with pending events that are not `configured`, and the number of these events.
///
/// # Errors
/// An error of the store.
pub async fn pending_for_unconfigured(
    store: &dyn Store,
    configured: &[String],
) -> Result<Vec<(String, u64)>, store::Error> {
    let mut pending: Vec<_> =
        store.gauges().await?.pending.into_iter().map(|(name, n, _)| (name, n)).collect();
    pending.retain(|(name, count)| *count > 0 && !configured.contains(name));
    pending.sort();
    Ok(pending)
}

/// Why a sink was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoChange {
    /// Neither the configuration nor a pending event names this sink.
    NotFound,
    /// It is already paused, or already open.
    Already,
}

/// The state of all sinks that the configuration or the store knows.
///
/// # Errors
/// An error of the store.
pub async fn list(store: &dyn Store, configured: &[String]) -> Result<SinkPage, store::Error> {
    let states = store.sinks(Reclaim::Expired).await?;
    let gauges = store.gauges().await?;
    let mut views: BTreeMap<String, SinkView> = BTreeMap::new();
    for name in configured {
        views.entry(name.clone()).or_default().configured = true;
    }
    for state in &states {
        show(views.entry(state.sink.clone()).or_default(), state);
    }
    for (name, pending, oldest) in gauges.pending {
        let view = views.entry(name).or_default();
        (view.pending, view.oldest_age_seconds) = (pending, oldest.as_secs());
    }
    for (name, dead) in gauges.dead {
        views.entry(name).or_default().dead = dead;
    }
    let mut sinks = Vec::with_capacity(views.len());
    for (name, mut view) in views {
        // An automatic pause has the last error until the sink is resumed. Otherwise the last delivery has it.
        let operator = view.reason == Some(PauseReason::Operator.as_str());
        if view.pending + view.dead > 0 && (operator || !view.paused) {
            view.last_error = store.last_failure(&name).await?.or(view.last_error);
        }
        if !view.configured {
            // No relay probes it. The probe in its row is from the time when it was configured.
            (view.next_probe_seconds, view.probing) = (None, false);
        }
        view.name = name;
        sinks.push(view);
    }
    Ok(SinkPage { sinks })
}

fn show(view: &mut SinkView, state: &SinkState) {
    view.since = Some(time(state.since));
    view.last_error.clone_from(&state.last_error);
    if let Some(pause) = &state.pause {
        view.paused = true;
        view.reason = Some(pause.reason.as_str());
        view.note.clone_from(&pause.note);
        (view.next_probe_seconds, view.probing) = match pause.probe {
            NextProbe::Never => (None, false),
            NextProbe::In(wait) => (Some(round_up(wait)), false),
            NextProbe::UnderWay { .. } => (Some(0), true),
        };
        view.failed_probes = pause.failed_probes;
    }
}

fn round_up(wait: Duration) -> u64 {
    wait.as_secs() + u64::from(wait.subsec_nanos() > 0)
}

/// The message about a sink that neither the configuration nor the store knows; `None`: one of them knows it.
///
/// # Errors
/// An error of the store.
pub async fn unknown_sink(
    store: &dyn Store,
    configured: &[String],
    name: &str,
) -> Result<Option<String>, store::Error> {
    if configured.iter().any(|known| known == name) {
        return Ok(None);
    }
    let (states, gauges) = (store.sinks(Reclaim::Expired).await?, store.gauges().await?);
    let mut known: BTreeSet<String> = configured.iter().cloned().collect();
    known.extend(states.into_iter().map(|state| state.sink));
    known.extend(gauges.pending.into_iter().map(|(sink, ..)| sink));
    known.extend(gauges.dead.into_iter().map(|(sink, _)| sink));
    if known.contains(name) {
        return Ok(None);
    }
    let all: Vec<&str> = known.iter().map(String::as_str).collect();
    Ok(Some(match nearest(name, all.iter().copied()) {
        Some(near) => format!("no such sink; did you mean `{near}`?"),
        None if all.is_empty() => "no such sink; there is none".to_owned(),
        None => format!("no such sink; there are {}", all.join(", ")),
    }))
}

/// Pauses or resumes a sink. `Ok(None)`: it is done.
///
/// # Errors
/// An error of the store.
pub async fn operate(
    store: &dyn Store,
    configured: &[String],
    name: &str,
    order: SinkOrder,
    by: &Operator,
) -> Result<Option<NoChange>, store::Error> {
    if unknown_sink(store, configured, name).await?.is_some() {
        return Ok(Some(NoChange::NotFound));
    }
    Ok(match store.operate_sink(name, order, by).await? {
        Changed::Yes => None,
        Changed::No | Changed::Locked => Some(NoChange::Already),
    })
}

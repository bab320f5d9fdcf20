//! An operator's action on events, for the command and the admin listener, and the report on each sink's delivery.
//!
//! The store decides whether an event may be changed, and writes the audit row.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use uuid::Uuid;

use super::detail::event_rows;
use super::sinks;
use crate::store::{self, Chosen, EventAction, EventRow, EventStatus, Operator, Store, Touched};

/// The name of the count in answers.
#[must_use]
pub fn done(action: EventAction) -> &'static str {
    match action {
        EventAction::Redeliver => "redelivered",
        EventAction::Discard => "discarded",
    }
}

/// Does the action.
///
/// # Errors
/// An error of the store.
pub async fn run(
    action: EventAction,
    store: &dyn Store,
    which: &Chosen,
    by: &Operator,
) -> Result<Touched, store::Error> {
    match action {
        EventAction::Redeliver => store.redeliver(which, by).await,
        EventAction::Discard => store.discard(which, by).await,
    }
}

/// What the action did to the delivery of an event to one sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkOutcome {
    /// It had ended. It is pending again.
    Queued,
    /// It was pending. It is due at once.
    Pending,
    /// It is discarded.
    Discarded,
    /// A worker delivers it now: not changed.
    Delivering,
    /// It was delivered: not changed.
    Sent,
    /// It was discarded before: not changed.
    AlreadyDiscarded,
    /// No sink wanted it: not changed.
    Unwanted,
    /// It became dead meanwhile: not changed.
    Dead,
}

impl SinkOutcome {
    fn touched(action: EventAction, was: EventStatus) -> Self {
        match (action, was) {
            (EventAction::Discard, _) => Self::Discarded,
            (EventAction::Redeliver, EventStatus::Pending) => Self::Pending,
            (EventAction::Redeliver, _) => Self::Queued,
        }
    }

    fn left_alone(row: &EventRow) -> Self {
        match row.status {
            EventStatus::Pending => Self::Delivering,
            EventStatus::Sent => Self::Sent,
            EventStatus::Dead => Self::Dead,
            EventStatus::Discarded if row.sink.is_empty() => Self::Unwanted,
            EventStatus::Discarded => Self::AlreadyDiscarded,
        }
    }

    fn is_done(self) -> bool {
        matches!(self, Self::Queued | Self::Pending | Self::Discarded)
    }

    /// The name in JSON. These names are stable.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Pending => "owed",
            Self::Discarded => "discarded",
            Self::Delivering => "delivering",
            Self::Sent => "sent",
            Self::AlreadyDiscarded => "discarded_before",
            Self::Unwanted => "unwanted",
            Self::Dead => "dead",
        }
    }

    fn words(self, action: EventAction) -> &'static str {
        let redeliver = action == EventAction::Redeliver;
        match self {
            Self::Queued => "queued again",
            Self::Pending => "was pending already, due now",
            Self::Discarded => "discarded",
            Self::Delivering => "being delivered right now",
            Self::Sent if redeliver => "delivered before (name the sink to send it again)",
            Self::Sent => "delivered before (what was sent is not discarded)",
            Self::AlreadyDiscarded if redeliver => {
                "discarded before (name the sink to send it all the same)"
            }
            Self::AlreadyDiscarded => "discarded before",
            Self::Unwanted if redeliver => "no sink wanted it (name the sink to send it to)",
            Self::Unwanted => "no sink wanted it",
            Self::Dead => "it became dead a moment ago",
        }
    }
}

/// The result of an action on one event for each sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionReport {
    action: EventAction,
    sinks: BTreeMap<String, SinkOutcome>,
}

impl ActionReport {
    /// Makes the report from the changed rows, and from all rows of the event after the change. With `sink`, only that sink
    /// counts.
    #[must_use]
    pub fn of(
        action: EventAction,
        sink: Option<&str>,
        touched: &Touched,
        rows: &[EventRow],
    ) -> Self {
        let meant = rows.iter().filter(|row| sink.is_none_or(|sink| row.sink == sink));
        let left = meant.map(|row| (row.sink.clone(), SinkOutcome::left_alone(row)));
        let done = touched.sinks.iter();
        let done = done.map(|(sink, was)| (sink.clone(), SinkOutcome::touched(action, *was)));
        Self { action, sinks: left.chain(done).collect() }
    }

    /// The report as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let sinks = self.sinks.iter();
        sinks.map(|(sink, outcome)| json!({ "sink": sink, "result": outcome.name() })).collect()
    }

    /// The report as text, one line for each sink.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let line = |(sink, outcome): (&String, &SinkOutcome)| {
            let left = if outcome.is_done() { "" } else { "left alone: " };
            format!("{}: {left}{}", named(sink), outcome.words(self.action))
        };
        self.sinks.iter().map(line).collect()
    }

    /// Why nothing was changed.
    fn reason(&self) -> &'static str {
        let all =
            |wanted: &[SinkOutcome]| self.sinks.values().all(|outcome| wanted.contains(outcome));
        if self.sinks.values().any(|outcome| *outcome == SinkOutcome::Delivering) {
            "delivering"
        } else if all(&[SinkOutcome::Sent]) {
            "sent"
        } else if all(&[SinkOutcome::AlreadyDiscarded, SinkOutcome::Unwanted]) {
            "discarded"
        } else {
            "left_alone"
        }
    }
}

fn named(sink: &str) -> &str {
    if sink.is_empty() { "-" } else { sink }
}

/// Why an event was not changed: a name for programs, and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionRefusal {
    /// `not_found`, `delivering` (at least one sink), `sent` or `discarded` (all sinks), or `left_alone`.
    pub name: &'static str,
    /// The sentence.
    pub detail: String,
}

/// Why the event with these rows was not changed.
#[must_use]
pub fn refusal(
    id: Uuid,
    sink: Option<&str>,
    rows: &[EventRow],
    report: &ActionReport,
) -> ActionRefusal {
    let refuse = |name, detail| ActionRefusal { name, detail };
    if rows.is_empty() {
        return refuse("not_found", format!("There is no event {id}."));
    }
    if let (Some(sink), true) = (sink, report.sinks.is_empty()) {
        return refuse("not_found", format!("Event {id} is not for the sink {sink}."));
    }
    let words = |(sink, outcome): (&String, &SinkOutcome)| {
        format!("{}: {}", named(sink), outcome.words(report.action))
    };
    let all: Vec<String> = report.sinks.iter().map(words).collect();
    refuse(report.reason(), format!("Event {id} was left alone. {}.", all.join("; ")))
}

/// What is wrong with the sink that an action names; `None`: nothing. A sink is also known if only the event has a row of it.
///
/// # Errors
/// An error of the store.
pub async fn wrong_sink(
    store: &dyn Store,
    configured: &[String],
    event: Option<Uuid>,
    sink: Option<&str>,
) -> Result<Option<String>, store::Error> {
    let Some(name) = sink else { return Ok(None) };
    let wrong = sinks::unknown_sink(store, configured, name).await?;
    if let (Some(_), Some(id)) = (&wrong, event)
        && event_rows(store, id).await?.iter().any(|row| row.sink == name)
    {
        return Ok(None);
    }
    Ok(wrong)
}

//! What is announced of a record's outcome itself: that it is unknown, and that it no longer is.
//!
//! One event when a record becomes unknown, one when it is resolved, each under a key made from the record and the attempt that
//! was unknown first: announced again, it is the same event. No route's template has a part in it.

use std::time::SystemTime;

use bytes::Bytes;
use serde_json::json;
use uuid::Uuid;

use super::subscription::{Subscriber, subscribed_to};
use super::{Event, Message, NAMESPACE, latest, raw};
use crate::record::{Attempt, RecordId, Scope};

/// A record that became unknown, or is no longer, and of which that has not been announced yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The record.
    pub record: RecordId,
    /// Its scope; `None`: the record is gone and nothing says any more whose it was.
    pub scope: Option<Scope>,
    /// The attempt that was unknown first.
    pub attempt: Attempt,
    /// Since when it is unknown.
    pub since: SystemTime,
    /// Now, by the database's clock.
    pub at: SystemTime,
    /// What is new.
    pub kind: NoticeKind,
}

/// What a notice says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoticeKind {
    /// It began.
    Unknown,
    /// It is over.
    Resolved(Resolution),
}

/// How an unknown record was resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// An outcome came.
    Completed,
    /// An operator said what happened.
    CompletedByOperator,
    /// The record is gone: it is known not to have executed.
    Released,
    /// An operator said that it did not execute.
    ReleasedByOperator,
}

impl Resolution {
    /// As the event says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::CompletedByOperator => "completed_by_operator",
            Self::Released => "released",
            Self::ReleasedByOperator => "released_by_operator",
        }
    }
}

impl Notice {
    /// The event that announces it. `None`: its scope is not known any more.
    #[must_use]
    pub fn event(&self, subscribers: &[Subscriber]) -> Option<Event> {
        let scope = self.scope.as_ref()?;
        let since = time(self.since);
        let (record, attempt) = (self.record.to_string(), self.attempt.number());
        let (kind, name, data) = match self.kind {
            NoticeKind::Unknown => {
                let data = json!({ "record": record, "attempt": attempt, "since": since });
                ("record.unknown", "unknown", data)
            }
            NoticeKind::Resolved(how) => {
                let how = how.as_str();
                let data = json!({ "record": record, "attempt": attempt, "since": since, "resolution": how });
                ("record.resolved", "resolved", data)
            }
        };
        // No route's event has a key like it: after the record's id those have a slash.
        let key = format!("{record}!{name}/{attempt}");
        let id = Uuid::new_v5(&NAMESPACE, key.as_bytes());
        let message = Message {
            kind,
            timestamp: &time(self.at),
            data: &raw(&data).ok()?,
            tenant: scope.tenant.as_str(),
            operation: scope.operation.as_str(),
            idempotency_key: scope.key.as_str(),
            id: &id.to_string(),
        };
        let payload = Bytes::from(serde_json::to_vec(&message).ok()?);
        let ordering_key = Some(record);
        let (sinks, kind) = (subscribed_to(subscribers, kind), kind.to_owned());
        Some(Event { id, key, kind, position: 0, ordering_key, payload, sinks })
    }
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_micros(latest(at)).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::record::event::subscription::{TypeFilter, TypePattern};
    use crate::record::{Key, Operation, Tenant};

    fn notice(kind: NoticeKind) -> Notice {
        Notice {
            record: Uuid::from_u128(7).into(),
            scope: Some(Scope {
                tenant: Tenant::stored("acme"),
                operation: Operation::stored("o"),
                key: Key::stored("k"),
            }),
            attempt: Attempt::FIRST,
            since: SystemTime::UNIX_EPOCH,
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(5),
            kind,
        }
    }

    #[test]
    fn the_message_says_which_record_since_when_and_how_it_ended() {
        let event =
            notice(NoticeKind::Resolved(Resolution::ReleasedByOperator)).event(&[]).unwrap();
        let message: serde_json::Value = serde_json::from_slice(&event.payload).unwrap();
        let expected = json!({
            "type": "record.resolved", "timestamp": "1970-01-01T00:00:05.000000Z",
            "tenant": "acme", "operation": "o", "idempotency_key": "k", "id": event.id.to_string(),
            "data": {
                "record": "00000000-0000-0000-0000-000000000007", "attempt": 1,
                "since": "1970-01-01T00:00:00.000000Z", "resolution": "released_by_operator",
            },
        });
        assert_eq!(message, expected);
    }

    #[test]
    fn it_goes_to_the_sinks_that_want_it() {
        let wanted = |pattern| TypeFilter::Matching(vec![TypePattern::parse(pattern).unwrap()]);
        let subscribers = ["order.*", "record.unknown", "record.*"]
            .map(|pattern| Subscriber { sink: pattern.into(), events: wanted(pattern) });
        let began = notice(NoticeKind::Unknown).event(&subscribers).unwrap();
        assert_eq!(began.sinks, ["record.unknown", "record.*"]);
        let ended = notice(NoticeKind::Resolved(Resolution::Released)).event(&subscribers).unwrap();
        assert_eq!(ended.sinks, ["record.*"]);
    }

    #[test]
    fn told_again_it_is_the_same_event_and_the_end_is_another() {
        let began = notice(NoticeKind::Unknown).event(&[]).unwrap();
        let later = Notice {
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(9),
            ..notice(NoticeKind::Unknown)
        }
        .event(&[])
        .unwrap();
        assert_eq!((&began.id, &began.key), (&later.id, &later.key));
        let ended = notice(NoticeKind::Resolved(Resolution::Completed)).event(&[]).unwrap();
        assert_ne!((&began.id, &began.key), (&ended.id, &ended.key));
    }
}

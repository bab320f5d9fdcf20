//! Parses query strings into filters, and the cursors of lists.
//!
//! All mistakes are reported at once: unknown parameters, repeated parameters, and wrong values. No parameter is ignored,
//! because the list would then show the wrong records.
//!
//! A cursor names its list and the last row of the page before. It is opaque to clients. It holds no secret and needs no
//! signature: a forged cursor only starts the list at another row.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use crate::record::Status;
use crate::store::{EventFilter, EventRow, EventStatus, RecordFilter, RecordRow};

/// The default number of rows of a page.
pub(super) const LIMIT_DEFAULT: u32 = 50;
/// The largest number of rows of a page.
pub(super) const LIMIT_MAX: u32 = 500;

/// The parameters of a list of records.
pub(super) const RECORD_NAMES: [&str; 7] =
    ["tenant", "operation", "key", "status", "since", "limit", "cursor"];
/// The parameters of a list of events.
pub(super) const EVENT_NAMES: [&str; 10] =
    ["tenant", "operation", "key", "record", "type", "sink", "status", "since", "limit", "cursor"];

/// A query in which each name is known and comes once.
#[derive(Debug)]
pub(super) struct Query<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'a> Query<'a> {
    /// Splits a query string, or names what is wrong with it.
    pub(super) fn parse(query: Option<&'a str>, known: &[&str]) -> Result<Self, Vec<String>> {
        let mut pairs: Vec<(Cow<'a, str>, Cow<'a, str>)> = Vec::new();
        let mut errors = Vec::new();
        for (name, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            if !known.contains(&name.as_ref()) {
                errors.push(unknown(&name, known));
            } else if pairs.iter().any(|(other, _)| *other == name) {
                errors.push(format!("`{name}` comes twice"));
            } else if value.chars().any(char::is_control) {
                errors.push(format!("`{name}` has a control character"));
            } else {
                pairs.push((name, value));
            }
        }
        if errors.is_empty() { Ok(Self(pairs)) } else { Err(errors) }
    }

    /// The filter of a list of records.
    pub(super) fn records(&self) -> Result<RecordFilter, Vec<String>> {
        let mut errors = Vec::new();
        let filter = RecordFilter {
            tenant: self.text("tenant"),
            operation: self.text("operation"),
            key: self.text("key"),
            status: self.with("status", &mut errors, record_status),
            since: self.with("since", &mut errors, since),
            after: self
                .with("cursor", &mut errors, |text| record_cursor(text).ok_or_else(foreign_cursor)),
            limit: self.with("limit", &mut errors, limit).unwrap_or(LIMIT_DEFAULT),
        };
        if errors.is_empty() { Ok(filter) } else { Err(errors) }
    }

    /// The filter of a list of events.
    pub(super) fn events(&self) -> Result<EventFilter, Vec<String>> {
        let mut errors = Vec::new();
        let record = |text: &str| text.parse().map_err(|_| "an id is a UUID".to_owned());
        let filter = EventFilter {
            id: None,
            record: self.with("record", &mut errors, record),
            tenant: self.text("tenant"),
            operation: self.text("operation"),
            key: self.text("key"),
            kind: self.text("type"),
            sink: self.text("sink"),
            status: self.with("status", &mut errors, event_status),
            since: self.with("since", &mut errors, since),
            after: self
                .with("cursor", &mut errors, |text| event_cursor(text).ok_or_else(foreign_cursor)),
            limit: self.with("limit", &mut errors, limit).unwrap_or(LIMIT_DEFAULT),
        };
        if errors.is_empty() { Ok(filter) } else { Err(errors) }
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_ref())
    }

    fn text(&self, name: &str) -> Option<String> {
        self.value(name).map(str::to_owned)
    }

    fn with<T>(
        &self,
        name: &str,
        errors: &mut Vec<String>,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        match read(self.value(name)?) {
            Ok(value) => Some(value),
            Err(wrong) => {
                errors.push(format!("`{name}`: {wrong}"));
                None
            }
        }
    }
}

/// The name that was most likely meant, if there is one.
pub(super) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let like = |other: &str| strsim::jaro_winkler(name, other);
    known.max_by(|a, b| like(a).total_cmp(&like(b))).filter(|near| like(near) > 0.8)
}

fn unknown(name: &str, known: &[&str]) -> String {
    match nearest(name, known.iter().copied()) {
        Some(near) => format!("`{name}` is not a parameter here; did you mean `{near}`?"),
        None if known.is_empty() => format!("`{name}` is not a parameter here; there are none"),
        None => format!("`{name}` is not a parameter here; there are {}", known.join(", ")),
    }
}

fn foreign_cursor() -> String {
    "not a cursor of this list: send `next` of the page before as it came".to_owned()
}

/// A record's status by its column value.
///
/// # Errors
/// Names the allowed values.
pub(crate) fn record_status(text: &str) -> Result<Status, String> {
    Status::parse(text)
        .ok_or_else(|| format!("one of {}", Status::ALL.map(Status::as_str).join(", ")))
}

/// An event's status by its column value.
///
/// # Errors
/// Names the allowed values.
pub(crate) fn event_status(text: &str) -> Result<EventStatus, String> {
    EventStatus::parse(text)
        .ok_or_else(|| format!("one of {}", EventStatus::ALL.map(EventStatus::as_str).join(", ")))
}

/// How far back a list goes. It is bounded, so that every database can subtract it from its clock.
///
/// # Errors
/// Says how a duration is written.
pub(crate) fn since(text: &str) -> Result<Duration, String> {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    humantime::parse_duration(text)
        .map(|time| time.min(CENTURY))
        .map_err(|_| "a duration such as 90s, 15m, 1h or 7d".to_owned())
}

fn limit(text: &str) -> Result<u32, String> {
    let limit = text.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
    limit.ok_or_else(|| format!("a number from 1 to {LIMIT_MAX}"))
}

/// The cursor of the page after this row.
pub(super) fn after_record(row: &RecordRow) -> String {
    let plain = format!("r.{}.{}", micros(row.created_at), row.id);
    URL_SAFE_NO_PAD.encode(plain)
}

/// The cursor of the page after this row.
pub(super) fn after_event(row: &EventRow) -> String {
    let plain = format!("e.{}.{}.{}", micros(row.created_at), row.id, row.sink);
    URL_SAFE_NO_PAD.encode(plain)
}

fn record_cursor(text: &str) -> Option<(SystemTime, Uuid)> {
    let plain = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    let (at, id) = plain.strip_prefix("r.")?.split_once('.')?;
    Some((at_micros(at)?, id.parse().ok()?))
}

fn event_cursor(text: &str) -> Option<(SystemTime, Uuid, String)> {
    let plain = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    let (at, rest) = plain.strip_prefix("e.")?.split_once('.')?;
    let (id, sink) = rest.split_once('.')?;
    if sink.chars().any(char::is_control) {
        return None;
    }
    Some((at_micros(at)?, id.parse().ok()?, sink.to_owned()))
}

/// Microseconds, because both databases store times to the microsecond.
fn micros(at: SystemTime) -> u128 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros()
}

fn at_micros(text: &str) -> Option<SystemTime> {
    // At most the year 9999, so that a forged cursor names no time that a database cannot hold.
    let micros: u64 = text.parse().ok().filter(|micros| *micros < 253_402_300_800_000_000)?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mistake_of_a_query_is_named_at_once() {
        let wrong = |query: &str| {
            Query::parse(Some(query), &RECORD_NAMES).and_then(|query| query.records()).unwrap_err()
        };
        assert_eq!(
            wrong("tennant=a&key=a&key=b&zz=1&operation=%00"),
            [
                "`tennant` is not a parameter here; did you mean `tenant`?",
                "`key` comes twice",
                "`zz` is not a parameter here; there are tenant, operation, key, status, since, limit, cursor",
                "`operation` has a control character",
            ]
        );
        assert_eq!(
            wrong("status=done&since=soon&limit=501&cursor=x"),
            [
                "`status`: one of in_progress, unknown, completed",
                "`since`: a duration such as 90s, 15m, 1h or 7d",
                "`cursor`: not a cursor of this list: send `next` of the page before as it came",
                "`limit`: a number from 1 to 500",
            ]
        );
        assert_eq!(wrong("limit=0"), ["`limit`: a number from 1 to 500"]);
    }

    #[test]
    fn a_query_becomes_the_filter_it_names() {
        let query = "tenant=a%20b&operation=o&key=k%2B1&status=unknown&since=2h&limit=500";
        let filter = Query::parse(Some(query), &RECORD_NAMES).unwrap().records().unwrap();
        assert_eq!(filter.tenant.as_deref(), Some("a b"));
        assert_eq!(filter.operation.as_deref(), Some("o"));
        assert_eq!(filter.key.as_deref(), Some("k+1"));
        assert_eq!(filter.status, Some(Status::Unknown));
        assert_eq!(filter.since, Some(Duration::from_secs(7200)));
        assert_eq!(filter.limit, 500);
        assert_eq!(Query::parse(None, &RECORD_NAMES).unwrap().records().unwrap().limit, 50);
    }

    #[test]
    fn cursors_of_one_list_do_not_continue_another_and_forged_ones_are_refused() {
        let record = URL_SAFE_NO_PAD.encode(format!("r.1000001.{}", Uuid::from_u128(7)));
        let event = URL_SAFE_NO_PAD.encode(format!("e.1000001.{}.a.b", Uuid::from_u128(7)));
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_000_001);
        assert_eq!(record_cursor(&record), Some((at, Uuid::from_u128(7))));
        assert_eq!(event_cursor(&event), Some((at, Uuid::from_u128(7), "a.b".to_owned())));
        assert_eq!(record_cursor(&event), None);
        assert_eq!(event_cursor(&record), None);
        for forged in ["", "r", "r.1", "r.x.y", "r.99999999999999999999.z", "e.1.2.3"] {
            let forged = URL_SAFE_NO_PAD.encode(forged);
            assert_eq!(record_cursor(&forged), None, "{forged}");
            assert_eq!(event_cursor(&forged), None, "{forged}");
        }
        let late = URL_SAFE_NO_PAD.encode(format!("r.{}.{}", u64::MAX, Uuid::from_u128(7)));
        assert_eq!(record_cursor(&late), None);
    }
}

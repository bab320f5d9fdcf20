//! What the answer to a delivery means for its event and for its sink. Pure.
//!
//! ```text
//! answer                             the event                                      the sink
//! 2xx                                delivered                                      healthy
//! 400, 413, 415, 422                 dead after `refusals_max` of them              healthy: it judged the event
//! 429, 503 with a Retry-After        given back, no attempt used                    busy: paused for that long; if that time
//!                                                                                   is already over, as for failures
//! 410                                given back, no attempt used                    gone: paused
//! all others, also 3xx and none      dead when attempts and age are both used up    failing: paused when too many in a row
//! ```
//!
//! An event that is not delivered is tried again after a growing pause with full jitter, or after the `Retry-After` of the
//! answer. Invariants: no input makes a pause longer than the configured maximum or shorter than [`PAUSE_MIN`], and
//! nothing here panics or overflows.

use std::time::{Duration, SystemTime};

use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};

use crate::store::{Trouble, Verdict};

/// Shortest pause before another attempt, so that no setting and no sink makes a hot loop.
pub const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause before the next probe of a sink, so that deliveries go on soon after an outage has ended.
pub const PROBE_MAX: Duration = Duration::from_secs(60);

/// The same if the last answer may be the fault of the event. After this many such answers the longer pause is used again, so
/// that this many events are tried soon after each other.
pub const SUSPECT_MAX: Duration = Duration::from_secs(2);
/// See [`SUSPECT_MAX`].
pub const SUSPECTS_MAX: u32 = 300;

/// Longest error text that is stored, in bytes.
pub const ERROR_MAX: usize = 1024;

/// Retries that a sink asked for at the same moment are spread over this time.
const SPREAD: Duration = Duration::from_secs(1);

/// When an event is retried, and when it is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Ceiling of the pause after the first failure; it doubles with each further one.
    pub base: Duration,
    /// The ceiling never grows beyond this, and no `Retry-After` asks for more.
    pub max: Duration,
    /// An event is dead only when this many attempts failed ...
    pub attempts_max: u32,
    /// ... and it is at least this old.
    pub age_max: Duration,
    /// An event that the sink refused this often (400, 413, 415, 422) is dead, whatever its attempts and age.
    pub refusals_max: u32,
}

/// The history of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Past {
    /// Attempts that failed before this one.
    pub attempts: u32,
    /// How many of them were refusals.
    pub refusals: u32,
    /// How long ago it was written.
    pub age: Duration,
}

/// What an attempt shows about the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It answers and judges events.
    Healthy,
    /// It fails. Too many failures in a row are an outage.
    Failing,
    /// It asks for no more deliveries, for a while or for good. It is paused at once.
    Stop(Trouble),
}

/// The known result of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The sink sent a status line with complete headers. The body does not matter.
    Answered {
        /// Its status.
        status: StatusCode,
        /// The beginning of its body, cleaned.
        text: String,
    },
    /// The target took it; for protocols without statuses.
    Taken,
    /// The target will never take this event; for protocols without statuses.
    Refused {
        /// Its error text.
        what: String,
    },
    /// No answer came. The sink may have taken the event.
    Failed {
        /// What went wrong, and in which phase.
        what: String,
    },
}

/// What happens to the event if the sink is not in [`Health::Stop`]. `share` is a random number from 0 to 1.
#[must_use]
pub fn verdict(
    evidence: &Evidence,
    past: Past,
    patience: &Patience,
    retry_after: Option<Duration>,
    share: f64,
) -> Verdict {
    let status = match evidence {
        Evidence::Answered { status, .. } if status.is_success() => {
            return Verdict::Sent { status: Some(status.as_u16()) };
        }
        Evidence::Taken => return Verdict::Sent { status: None },
        Evidence::Answered { status, .. } => Some(status.as_u16()),
        Evidence::Refused { .. } | Evidence::Failed { .. } => None,
    };
    let (refused, error) = (refuses(evidence), error(evidence));
    let used_up =
        past.attempts.saturating_add(1) >= patience.attempts_max && past.age >= patience.age_max;
    let hopeless = refused && past.refusals.saturating_add(1) >= patience.refusals_max;
    if used_up || hopeless {
        return Verdict::Dead { status, error };
    }
    let delay = match asked(retry_after) {
        Some(hint) => asked_pause(hint, patience, share),
        None => pause(past.attempts, patience, share),
    };
    if refused {
        return Verdict::Refused { delay, status, error };
    }
    Verdict::Retry { delay, status, error }
}

/// What the answer shows about the sink. `failed_probes` is the number of probes that failed lately.
#[must_use]
pub fn health_of(
    evidence: &Evidence,
    patience: &Patience,
    retry_after: Option<Duration>,
    failed_probes: u32,
    share: f64,
) -> Health {
    if refuses(evidence) {
        return Health::Healthy;
    }
    let status = match evidence {
        Evidence::Taken => return Health::Healthy,
        Evidence::Answered { status, .. } if status.is_success() => return Health::Healthy,
        Evidence::Answered { status, .. } => *status,
        Evidence::Refused { .. } | Evidence::Failed { .. } => return Health::Failing,
    };
    match (status, retry_after) {
        (StatusCode::GONE, _) => Health::Stop(Trouble::Gone),
        (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE, Some(hint)) => {
            // A Retry-After of zero or in the past also pauses the sink.
            let again = match asked(Some(hint)) {
                Some(hint) => asked_pause(hint, patience, share),
                None => until_probe(failed_probes, patience, share, false),
            };
            Health::Stop(Trouble::Busy { again })
        }
        _ => Health::Failing,
    }
}

/// Gives the event back without using an attempt, and notes the error. It is due at once, behind all events that are due.
#[must_use]
pub fn returned(evidence: &Evidence) -> Verdict {
    let status = match evidence {
        Evidence::Answered { status, .. } => Some(status.as_u16()),
        Evidence::Taken | Evidence::Refused { .. } | Evidence::Failed { .. } => None,
    };
    Verdict::Returned { delay: Duration::ZERO, status, error: error(evidence) }
}

/// The text of the error.
#[must_use]
pub fn error(evidence: &Evidence) -> String {
    match evidence {
        Evidence::Answered { status, text } => complaint(*status, text),
        Evidence::Taken => String::new(),
        Evidence::Refused { what } | Evidence::Failed { what } => clean(what),
    }
}

/// Whether the sink judges the event, not itself.
fn refuses(evidence: &Evidence) -> bool {
    match evidence {
        Evidence::Refused { .. } => true,
        Evidence::Answered { status, .. } => matches!(
            *status,
            StatusCode::BAD_REQUEST
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNSUPPORTED_MEDIA_TYPE
                | StatusCode::UNPROCESSABLE_ENTITY
        ),
        Evidence::Taken | Evidence::Failed { .. } => false,
    }
}

/// The time of a `Retry-After`. Zero and past dates count as none.
fn asked(retry_after: Option<Duration>) -> Option<Duration> {
    retry_after.filter(|hint| !hint.is_zero())
}

/// The pause after a failure that followed `attempts` others: a random time up to a ceiling that doubles.
#[must_use]
pub fn pause(attempts: u32, patience: &Patience, share: f64) -> Duration {
    let growth = 2_u32.saturating_pow(attempts);
    let ceiling = patience.base.saturating_mul(growth).min(patience.max);
    part(ceiling, share).max(PAUSE_MIN)
}

/// Whether a failure may be the fault of the event: an error of the program behind the sink. An error of a proxy before it, or
/// no answer, is not.
#[must_use]
pub fn suspects(evidence: &Evidence) -> bool {
    let Evidence::Answered { status, .. } = evidence else { return false };
    status.is_server_error() && !matches!(status.as_u16(), 502..=504)
}

/// The pause before the first probe of a sink that fails. It is zero unless probes failed lately: perhaps only some events
/// fail, and then another event shows that at once. A sink that is down gets one more request.
#[must_use]
pub fn until_first_probe(
    failed_probes: u32,
    patience: &Patience,
    share: f64,
    suspect: bool,
) -> Duration {
    if failed_probes == 0 {
        return Duration::ZERO;
    }
    until_probe(failed_probes, patience, share, suspect)
}

/// The pause before the next probe after this many failed ones. `suspect`: the last failure may be the fault of the event.
#[must_use]
pub fn until_probe(failed_probes: u32, patience: &Patience, share: f64, suspect: bool) -> Duration {
    let soon = suspect && failed_probes <= SUSPECTS_MAX;
    let max = patience.max.min(if soon { SUSPECT_MAX } else { PROBE_MAX });
    pause(failed_probes, &Patience { max, ..*patience }, share)
}

fn asked_pause(hint: Duration, patience: &Patience, share: f64) -> Duration {
    hint.saturating_add(part(SPREAD, share)).min(patience.max).max(PAUSE_MIN)
}

/// A share of a duration. A share below 0 counts as 0, and one above 1 as 1.
fn part(whole: Duration, share: f64) -> Duration {
    let share = if share.is_nan() { 1.0 } else { share.clamp(0.0, 1.0) };
    Duration::try_from_secs_f64(whole.as_secs_f64() * share).unwrap_or(whole)
}

/// The one `Retry-After` of an answer: whole seconds, or an HTTP date. `None` for anything else, and for several.
#[must_use]
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let mut values = headers.get_all(RETRY_AFTER).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let text = value.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // A number that does not fit is a very long time. The caller cuts it to its maximum.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or(Duration::ZERO))
}

fn complaint(status: StatusCode, text: &str) -> String {
    let number = status.as_u16();
    if status.is_redirection() {
        return format!("the sink answered {number}: redirects are not followed");
    }
    if text.is_empty() {
        return format!("the sink answered {number}");
    }
    clean(&format!("the sink answered {number}: {text}"))
}

/// Cleans foreign text before it is stored and shown: one line, at most [`ERROR_MAX`] bytes, no invisible characters.
#[must_use]
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len().min(ERROR_MAX));
    for c in text.chars() {
        let hidden = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        let c = if hidden { ' ' } else { c };
        if cleaned.len() + c.len_utf8() > ERROR_MAX {
            break;
        }
        cleaned.push(c);
    }
    cleaned.truncate(cleaned.trim_end().len());
    cleaned
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const PATIENCE: Patience = Patience {
        base: Duration::from_secs(1),
        max: HOUR,
        attempts_max: 3,
        age_max: HOUR,
        refusals_max: 5,
    };
    const NEW: Past = Past { attempts: 0, refusals: 0, age: Duration::ZERO };

    fn answered(status: u16) -> Evidence {
        Evidence::Answered { status: StatusCode::from_u16(status).unwrap(), text: "no".into() }
    }

    fn delay(status: u16, hint: Option<Duration>, share: f64) -> Duration {
        let verdict = verdict(&answered(status), NEW, &PATIENCE, hint, share);
        let Verdict::Retry { delay, .. } = verdict else { panic!("{verdict:?}") };
        delay
    }

    #[test]
    fn every_2xx_delivers_and_nothing_else_does() {
        for status in 100..=999 {
            let verdict = verdict(&answered(status), NEW, &PATIENCE, None, 0.5);
            let sent = verdict == Verdict::Sent { status: Some(status) };
            assert_eq!(sent, (200..300).contains(&status), "{status}");
        }
    }

    #[test]
    fn an_event_is_dead_only_when_attempts_and_age_are_both_used_up() {
        for (attempts, age, dead) in [
            (1, HOUR, false),
            (2, HOUR - Duration::from_secs(1), false),
            (2, HOUR, true),
            (500, Duration::from_secs(60), false),
            (u32::MAX, HOUR, true),
        ] {
            let past = Past { attempts, refusals: 0, age };
            let verdict = verdict(&answered(500), past, &PATIENCE, None, 0.5);
            assert_eq!(matches!(verdict, Verdict::Dead { .. }), dead, "{attempts} {age:?}");
        }
    }

    #[test]
    fn pauses_double_to_their_maximum_and_spread_over_the_whole_of_it() {
        assert_eq!(pause(0, &PATIENCE, 1.0), Duration::from_secs(1));
        assert_eq!(pause(3, &PATIENCE, 1.0), Duration::from_secs(8));
        assert_eq!(pause(3, &PATIENCE, 0.25), Duration::from_secs(2));
        assert_eq!(pause(u32::MAX, &PATIENCE, 1.0), HOUR);
        assert_eq!(pause(5, &PATIENCE, 0.0), PAUSE_MIN);
        let zero = Patience { base: Duration::ZERO, max: Duration::ZERO, ..PATIENCE };
        assert_eq!(pause(9, &zero, 1.0), PAUSE_MIN);
        let endless = Patience { base: Duration::MAX, max: Duration::MAX, ..PATIENCE };
        assert!(pause(9, &endless, f64::NAN) >= PAUSE_MIN);
    }

    #[test]
    fn the_pauses_of_many_failures_do_not_meet_in_one_second() {
        let mut per_second = [0_u32; 16];
        for step in 0..10_000 {
            let pause = pause(4, &PATIENCE, f64::from(step) / 10_000.0);
            per_second[usize::try_from(pause.as_secs()).unwrap()] += 1;
        }
        assert!(per_second.iter().all(|count| *count < 2 * 10_000 / 16), "{per_second:?}");
    }

    #[test]
    fn an_event_that_is_refused_often_enough_is_dead_whatever_its_attempts_and_age() {
        for status in [400, 413, 415, 422] {
            let judge = |refusals| {
                let past = Past { refusals, ..NEW };
                verdict(&answered(status), past, &PATIENCE, None, 0.5)
            };
            assert!(matches!(judge(3), Verdict::Refused { .. }), "{status}");
            assert!(matches!(judge(4), Verdict::Dead { .. }), "{status}");
            let health = health_of(&answered(status), &PATIENCE, None, 0, 0.5);
            assert_eq!(health, Health::Healthy, "{status} says nothing against the sink");
        }
        // Only refusals count, not the failures between them.
        let past = Past { attempts: 500, refusals: 1, age: Duration::ZERO };
        let judged = verdict(&answered(422), past, &PATIENCE, None, 0.5);
        assert!(matches!(judged, Verdict::Refused { .. }), "{judged:?}");
        let past = Past { refusals: 500, ..NEW };
        let judged = verdict(&answered(500), past, &PATIENCE, None, 0.5);
        assert!(matches!(judged, Verdict::Retry { .. }), "{judged:?}");
    }

    #[test]
    fn what_is_neither_taken_nor_refused_speaks_against_the_sink() {
        for status in [301, 302, 304, 401, 403, 404, 408, 429, 500, 502, 503, 504, 999] {
            let health = health_of(&answered(status), &PATIENCE, None, 0, 0.5);
            assert_eq!(health, Health::Failing, "{status}");
        }
        let silent = Evidence::Failed { what: "time-out".into() };
        assert_eq!(health_of(&silent, &PATIENCE, None, 0, 0.5), Health::Failing);
        // Of targets without statuses.
        let refused = Evidence::Refused { what: "too large".into() };
        for well in [&Evidence::Taken, &refused] {
            assert_eq!(health_of(well, &PATIENCE, None, 0, 0.5), Health::Healthy);
        }
        let judged = verdict(&refused, NEW, &PATIENCE, None, 0.5);
        assert!(matches!(judged, Verdict::Refused { status: None, .. }), "{judged:?}");
        let gone = health_of(&answered(410), &PATIENCE, Some(HOUR), 0, 0.5);
        assert_eq!(gone, Health::Stop(Trouble::Gone));
    }

    #[test]
    fn retry_after_pauses_the_sink_on_429_and_503_and_else_delays_the_event() {
        let five = Some(Duration::from_secs(5));
        let busy = |status, hint, share| {
            let health = health_of(&answered(status), &PATIENCE, hint, 3, share);
            let Health::Stop(Trouble::Busy { again }) = health else {
                panic!("{status}: {health:?}")
            };
            again
        };
        for share in [0.0, 0.5, 1.0] {
            for pause in [busy(429, five, share), busy(503, five, share), delay(500, five, share)] {
                assert!((5.0..=6.0).contains(&pause.as_secs_f64()), "{pause:?}");
            }
        }
        assert_eq!(busy(429, Some(Duration::MAX), 1.0), HOUR);
        assert!(busy(503, Some(Duration::from_nanos(1)), 0.0) >= PAUSE_MIN);
        assert_eq!(health_of(&answered(429), &PATIENCE, None, 3, 0.5), Health::Failing);
        assert!(
            delay(429, None, 0.0) >= PAUSE_MIN
                && delay(500, Some(Duration::ZERO), 0.0) >= PAUSE_MIN
        );
    }

    #[test]
    fn whoever_asks_for_no_time_to_come_is_left_alone_as_if_it_failed() {
        for status in [429, 503] {
            let busy = |failed, share| {
                let none = Some(Duration::ZERO);
                let health = health_of(&answered(status), &PATIENCE, none, failed, share);
                let Health::Stop(Trouble::Busy { again }) = health else { panic!("{health:?}") };
                again
            };
            assert_eq!((busy(0, 0.0), busy(0, 1.0)), (PAUSE_MIN, PATIENCE.base));
            assert_eq!((busy(3, 0.5), busy(u32::MAX, 1.0)), (4 * PATIENCE.base, PROBE_MAX));
        }
    }

    #[test]
    fn the_first_probe_goes_at_once_and_none_waits_longer_than_a_minute() {
        for share in [0.0, 0.5, 1.0] {
            assert_eq!(until_first_probe(0, &PATIENCE, share, false), Duration::ZERO);
            // It failed again.
            assert_eq!(until_first_probe(2, &PATIENCE, share, false), pause(2, &PATIENCE, share));
            assert_eq!(until_probe(2, &PATIENCE, share, false), pause(2, &PATIENCE, share));
        }
        for failed in [6, 12, u32::MAX] {
            assert_eq!(until_probe(failed, &PATIENCE, 1.0, false), PROBE_MAX);
            assert_eq!(until_first_probe(failed, &PATIENCE, 1.0, false), PROBE_MAX);
        }
        let hasty = Patience { max: 5 * PATIENCE.base, ..PATIENCE };
        assert_eq!(until_probe(u32::MAX, &hasty, 1.0, false), hasty.max);
    }

    #[test]
    fn many_events_that_a_program_chokes_on_are_tried_out_one_soon_after_the_other() {
        for (status, suspect) in [
            (500, true),
            (501, true),
            (599, true),
            (502, false),
            (503, false),
            (504, false),
            (404, false),
        ] {
            assert_eq!(suspects(&answered(status)), suspect, "{status}");
        }
        assert!(!suspects(&Evidence::Failed { what: "refused".into() }));
        for failed in [6, 12, SUSPECTS_MAX] {
            assert_eq!(until_probe(failed, &PATIENCE, 1.0, true), SUSPECT_MAX);
            assert_eq!(until_first_probe(failed, &PATIENCE, 1.0, true), SUSPECT_MAX);
        }
        assert_eq!(until_probe(SUSPECTS_MAX + 1, &PATIENCE, 1.0, true), PROBE_MAX);
        let hasty = Patience { max: SUSPECT_MAX / 2, ..PATIENCE };
        assert_eq!(until_probe(u32::MAX, &hasty, 1.0, true), hasty.max);
    }

    #[test]
    fn odd_retry_after_values_are_ignored_or_cut_and_never_panic() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let seconds = |s| Some(Duration::from_secs(s));
        for (values, expected) in [
            (&["5"][..], seconds(5)),
            (&["0"], seconds(0)),
            (&["-1"], None),
            (&["+1"], None),
            (&["1.5"], None),
            (&["1e30"], None),
            (&["inf"], None),
            (&["NaN"], None),
            (&["99999999999999999999"], seconds(u64::MAX)),
            (&["Sun, 06 Nov 1994 08:39:37 GMT"], seconds(0)),
            (&["Sun, 06 Nov 1994 08:59:37 GMT"], seconds(600)),
            (&["Sunday, 06-Nov-94 08:59:37 GMT"], seconds(600)),
            (&["Sun Nov  6 08:59:37 1994"], seconds(600)),
            (&["5", "10"], None),
            (&[""], None),
            (&["5, 10"], None),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(RETRY_AFTER, HeaderValue::from_static(value));
            }
            assert_eq!(retry_after(&headers, now), expected, "{values:?}");
        }
        let far = HeaderValue::from_static("Fri, 31 Dec 9999 23:59:59 GMT");
        let headers = HeaderMap::from_iter([(RETRY_AFTER, far)]);
        assert_eq!(delay(500, retry_after(&headers, now), 0.5), HOUR);
    }

    #[test]
    fn error_texts_are_one_short_line_that_every_store_can_hold() {
        let text = format!("a\0b\r\nc\u{202e}d{}", "é".repeat(2000));
        let cleaned = clean(&text);
        assert!(cleaned.starts_with("a b  c dé"), "{cleaned}");
        assert!(cleaned.len() <= ERROR_MAX && cleaned.len() > ERROR_MAX - 4);
    }

    #[test]
    fn a_redirect_is_a_failure_that_says_so() {
        let verdict = verdict(&answered(302), NEW, &PATIENCE, None, 0.5);
        let Verdict::Retry { error, status: Some(302), .. } = verdict else {
            panic!("{verdict:?}")
        };
        assert!(error.contains("redirect"), "{error}");
    }
}

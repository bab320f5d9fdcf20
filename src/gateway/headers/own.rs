//! The gateway's own headers.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::record::RecordId;

/// Marks an answer from the store. Set by the gateway only.
pub(in crate::gateway) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The record that an answer is about.
pub(in crate::gateway) const RECORD: HeaderName = HeaderName::from_static("oncegate-record");
/// The attempt, towards the upstream.
pub(in crate::gateway) const ATTEMPT: HeaderName = HeaderName::from_static("oncegate-attempt");
/// When a kept answer expires.
pub(in crate::gateway) const EXPIRES: HeaderName = HeaderName::from_static("oncegate-expires");
/// Marks an answer to a request that was forwarded unprotected.
pub(in crate::gateway) const BYPASSED: HeaderName = HeaderName::from_static("oncegate-bypassed");
/// `false`: the upstream answered, and neither store nor spill has taken the answer yet, or not as the record's answer.
pub(in crate::gateway) const STORED: HeaderName = HeaderName::from_static("oncegate-stored");

/// Names the record that an answer is about.
pub(in crate::gateway) fn name_record(headers: &mut HeaderMap, record: RecordId) {
    if let Ok(value) = HeaderValue::try_from(record.to_string()) {
        headers.insert(RECORD, value);
    }
}

/// Says until when an answer is kept. What a date of HTTP cannot say any more, as after a clock far off, is named by the
/// nearest one that it can say.
pub(in crate::gateway) fn name_expiry(headers: &mut HeaderMap, expires_at: SystemTime) {
    const YEAR_9999: Duration = Duration::from_secs(253_402_300_799);
    let expires_at = expires_at.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + YEAR_9999);
    if let Ok(value) = HeaderValue::from_str(&httpdate::fmt_http_date(expires_at)) {
        headers.insert(EXPIRES, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiry_that_http_cannot_write_is_named_by_the_nearest_date() {
        let year = Duration::from_secs(31_557_600);
        for (expires_at, date) in [
            (SystemTime::UNIX_EPOCH + 30_000 * year, "Fri, 31 Dec 9999 23:59:59 GMT"),
            (SystemTime::UNIX_EPOCH - year, "Thu, 01 Jan 1970 00:00:00 GMT"),
        ] {
            let mut headers = HeaderMap::new();
            name_expiry(&mut headers, expires_at);
            assert_eq!(headers[EXPIRES], date);
        }
    }
}

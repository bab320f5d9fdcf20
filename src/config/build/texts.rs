//! Parsers for texts of the configuration: URLs, headers, methods, statuses.

use http::{HeaderName, Method, StatusCode, Uri};

use crate::record::outcome::Code;
use crate::relay::address::port_problem;

pub(super) fn read_upstream_url(text: &str) -> Result<Uri, String> {
    let how = "write \"http://host:port\" or \"https://host\", without a path";
    let url = read_base(text, how)?;
    if !matches!(url.path(), "" | "/") || url.query().is_some() {
        return Err(format!("a path or a query has no meaning here; {how}"));
    }
    Ok(url)
}

/// A URL of an http or https server. `how` says what to write instead.
pub(super) fn read_base(text: &str, how: &str) -> Result<Uri, String> {
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    if rest.split(['/', '?', '#']).next().is_some_and(|authority| authority.contains('@')) {
        // The text may hold a password, so the message does not repeat it.
        return Err(format!("a user before the host (`...@`) has no meaning here; {how}"));
    }
    if let Some(wrong) = port_problem(text) {
        return Err(wrong);
    }
    let url: Uri = text.parse().map_err(|_| format!("{text:?} is not a URL; {how}"))?;
    let scheme = url.scheme_str().unwrap_or_default();
    let authority = url.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    if !matches!(scheme, "http" | "https") || authority.is_empty() {
        return Err(format!("{text:?} names no http or https server; {how}"));
    }
    Ok(url)
}

pub(super) fn read_header(text: &str) -> Result<HeaderName, String> {
    text.parse().map_err(|_| format!("{text:?} cannot be the name of a header"))
}

pub(super) fn read_method(text: &str) -> Result<Method, String> {
    let capital = text.bytes().all(|byte| byte.is_ascii_uppercase());
    match text.parse::<Method>() {
        Ok(Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::CONNECT) => {
            Err(format!(
                "{text} does not change the upstream, or its answer cannot be stored; it passes through"
            ))
        }
        Ok(method) if capital => Ok(method),
        Ok(_) | Err(_) => {
            Err(format!("{text:?} is not a method; write it in capitals, such as \"POST\""))
        }
    }
}

/// `429`, `"503+retry-after"` (only with that header), `"503-retry-after"` (only without it) or `"5xx"` (all of them).
pub(super) fn read_code(text: &str) -> Result<Code, String> {
    let how = || {
        format!(
            "{text:?} is not a status; write 429, \"503+retry-after\" (with that header), \"503-retry-after\" (without it) or \"5xx\""
        )
    };
    if let Some(digit) = text.strip_suffix("xx") {
        let hundred = digit.parse().ok().filter(|digit| (2..=5).contains(digit));
        return hundred.map(Code::Hundred).ok_or_else(how);
    }
    let digits = text.get(..3).ok_or_else(how)?;
    let status: u16 = digits.parse().map_err(|_| how())?;
    let status = StatusCode::from_u16(status).map_err(|_| how())?;
    if !(200..=599).contains(&status.as_u16()) {
        return Err(format!("{status} is not a final status; write a status from 200 to 599"));
    }
    match text.get(3..).unwrap_or_default() {
        "" => Ok(Code::Always(status)),
        "+retry-after" => Ok(Code::WithRetryAfter(status)),
        "-retry-after" => Ok(Code::WithoutRetryAfter(status)),
        _ => Err(how()),
    }
}

/// Whether an entry of the file removes an entry from a default list.
pub(super) fn covers(written: Code, default: Code) -> bool {
    let (Code::Hundred(digit), Some(status)) = (written, status_of(default)) else {
        return same_answer(written, default);
    };
    status.as_u16() / 100 == digit
}

/// Whether two entries name the same answer in the same way. An entry like "503" wins over one like "5xx".
pub(super) fn same_answer(one: Code, other: Code) -> bool {
    if let (Code::Hundred(digit), Code::Hundred(other)) = (one, other) {
        return digit == other;
    }
    let retry_after = |code| match code {
        Code::Always(_) | Code::Hundred(_) => (true, true),
        Code::WithRetryAfter(_) => (true, false),
        Code::WithoutRetryAfter(_) => (false, true),
    };
    let ((with, without), (with2, without2)) = (retry_after(one), retry_after(other));
    let same = status_of(one).is_some() && status_of(one) == status_of(other);
    same && (with && with2 || without && without2)
}

pub(super) fn status_of(code: Code) -> Option<StatusCode> {
    match code {
        Code::Always(status) | Code::WithRetryAfter(status) | Code::WithoutRetryAfter(status) => {
            Some(status)
        }
        Code::Hundred(_) => None,
    }
}

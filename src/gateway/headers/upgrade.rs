//! To which protocol a request asks to be switched, and whether an answer switches to that one.
//!
//! What must stay true: nothing that carries HTTP requests is ever asked for, because they would go past the routes and their
//! reservations (`h2c` above all, which some clients ask for with each request). Such an offer is left out, as RFC 9110, 7.8
//! allows: the request is then an ordinary one. So is one that is malformed.

use http::{HeaderMap, HeaderName, HeaderValue, Request, Version, header};

use super::named_by_connection;

/// HTTP itself, and what it is carried in.
const CARRY_HTTP: [&str; 6] = ["h2c", "h2", "http", "https", "tls", "ssl"];

/// The protocols that a request asks for, as they were spelled; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer(Vec<String>);

impl Offer {
    /// What a request asks for. It may still have a body, which must have gone before anything can be switched.
    #[must_use]
    pub fn of<B>(request: &Request<B>) -> Option<Self> {
        let headers = request.headers();
        if request.version() != Version::HTTP_11
            || !named_by_connection(headers).contains(&header::UPGRADE)
        {
            return None;
        }
        let mut offered = protocols(headers)?;
        offered.retain(|protocol| {
            let name = protocol.split('/').next().unwrap_or_default();
            !CARRY_HTTP.iter().any(|http| name.eq_ignore_ascii_case(http))
        });
        (!offered.is_empty()).then_some(Self(offered))
    }

    /// Asks for the same of the next hop.
    pub(in crate::gateway) fn write(&self, headers: &mut HeaderMap) {
        write(&self.0, headers);
    }

    /// The protocols that a 101 switches to, if all of them were asked for.
    pub(in crate::gateway) fn taken(&self, answer: &HeaderMap) -> Option<Self> {
        let taken = protocols(answer)?;
        let asked =
            |protocol: &String| self.0.iter().any(|ours| ours.eq_ignore_ascii_case(protocol));
        (!taken.is_empty() && taken.iter().all(asked)).then_some(Self(taken))
    }
}

impl std::fmt::Display for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

fn write(protocols: &[String], headers: &mut HeaderMap) {
    if let Ok(list) = HeaderValue::from_str(&protocols.join(", ")) {
        headers.insert(header::UPGRADE, list);
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
}

/// The items of all `Upgrade` lines; none if one is malformed: `token ["/" token]`.
fn protocols(headers: &HeaderMap) -> Option<Vec<String>> {
    let mut protocols = Vec::new();
    for line in headers.get_all(header::UPGRADE) {
        for item in line.to_str().ok()?.split(',').map(str::trim) {
            let mut halves = item.splitn(2, '/');
            if !halves.all(|half| HeaderName::from_bytes(half.as_bytes()).is_ok()) {
                return None;
            }
            protocols.push(item.to_owned());
        }
    }
    Some(protocols)
}

#[cfg(test)]
mod tests {
    use super::super::tests::map;
    use super::*;

    fn offer(version: Version, lines: &[(&str, &str)]) -> String {
        let mut request = Request::builder().version(version);
        *request.headers_mut().unwrap() = map(lines);
        Offer::of(&request.body(()).unwrap()).map_or_else(String::new, |offer| offer.to_string())
    }

    #[test]
    fn nothing_that_carries_http_is_asked_for() {
        let connection = ("connection", "keep-alive, Upgrade");
        for (upgrade, wanted) in [
            ("websocket", "websocket"),
            ("WebSocket, foo/2", "WebSocket, foo/2"),
            ("h2c", ""),
            ("H2C, websocket", "websocket"),
            ("TLS/1.0, HTTP/1.1", ""),
            ("http/2.0", ""),
            ("connect-udp", "connect-udp"),
            ("", ""),
            ("a b", ""),
            ("websocket,", ""),
            ("websocket/", ""),
            ("websocket/1/2", ""),
            ("websocket;q=1", ""),
        ] {
            let lines = [connection, ("upgrade", upgrade)];
            assert_eq!(offer(Version::HTTP_11, &lines), wanted, "{upgrade:?}");
            assert_eq!(offer(Version::HTTP_10, &lines), "");
            assert_eq!(offer(Version::HTTP_11, &lines[1..]), "", "no option of the connection");
        }
        assert_eq!(offer(Version::HTTP_11, &[connection]), "");
        let lines = [connection, ("upgrade", "a"), ("upgrade", "h2c, b")];
        assert_eq!(offer(Version::HTTP_11, &lines), "a, b");
    }

    #[test]
    fn only_what_was_asked_for_is_switched_to() {
        let offer = Offer(vec!["websocket".to_owned(), "foo/2".to_owned()]);
        for (answer, wanted) in [
            ("WebSocket", Some("WebSocket")),
            ("foo/2", Some("foo/2")),
            ("foo/2, websocket", Some("foo/2, websocket")),
            ("foo", None),
            ("h2c", None),
            ("websocket, h2c", None),
            ("", None),
        ] {
            let taken = offer.taken(&map(&[("upgrade", answer)]));
            assert_eq!(taken.map(|taken| taken.to_string()).as_deref(), wanted, "{answer:?}");
        }
        assert_eq!(offer.taken(&map(&[])), None);
    }
}

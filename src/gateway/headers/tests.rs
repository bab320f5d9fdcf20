//! Which headers go on to the upstream, are kept, and come back.

use super::*;

pub(super) fn map(lines: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_str(value).unwrap());
    }
    headers
}

fn names(headers: &HeaderMap) -> Vec<&str> {
    let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    names
}

fn gate(method: &str, uri: &str, version: Version, lines: &[(&str, &str)]) -> u16 {
    let mut request = Request::builder().method(method).uri(uri).version(version);
    *request.headers_mut().unwrap() = map(lines);
    check_framing(&request.body(()).unwrap()).map_or_else(|r| r.status.as_u16(), |()| 200)
}

#[test]
fn ambiguous_requests_are_refused() {
    let v11 = Version::HTTP_11;
    for (wanted, value) in [
        (200, "chunked"),
        (200, "CHUNKED"),
        (200, "chunked\t"),
        (501, ",chunked"),
        (501, "chunked,"),
        (501, "chunked, chunked"),
        (501, "gzip, chunked"),
        (501, "xchunked"),
        (501, "\"chunked\""),
        (501, "chunked;q=1"),
        (501, "identity"),
        (501, ""),
    ] {
        let lines = [("host", "a"), ("transfer-encoding", value)];
        assert_eq!(gate("POST", "/x", v11, &lines), wanted, "{value:?}");
    }
    let twice = [("host", "a"), ("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")];
    assert_eq!(gate("POST", "/x", v11, &twice), 501);
    let old = [("transfer-encoding", "chunked")];
    assert_eq!(gate("POST", "/x", Version::HTTP_10, &old), 400);
}

#[test]
fn host_is_one_host_and_port() {
    for good in ["a", "a.example:80", "[::1]", "[::1]:8080", "10.0.0.1:1", "a_b~c", "a:"] {
        assert_eq!(gate("GET", "/", Version::HTTP_11, &[("host", good)]), 200, "{good}");
    }
    for bad in ["", "a b", "a@b", "a/b", "a,b", "[::1", "[x]", "[::1]x", "a:b", "a:1:2", "é"] {
        let wanted = if bad == "a,b" { 200 } else { 400 }; // a comma is lawful in a reg-name
        assert_eq!(gate("GET", "/", Version::HTTP_11, &[("host", bad)]), wanted, "{bad}");
    }
    assert_eq!(gate("GET", "/", Version::HTTP_11, &[]), 400);
    assert_eq!(gate("GET", "/", Version::HTTP_10, &[]), 200);
    assert_eq!(gate("GET", "/", Version::HTTP_11, &[("host", "a"), ("host", "a")]), 400);
}

#[test]
fn targets_have_one_of_three_forms() {
    let host = [("host", "a")];
    for (wanted, method, uri) in [
        (200, "GET", "http://evil.example/x?y"),
        (200, "GET", "HTTP://A/x"),
        (200, "OPTIONS", "*"),
        (400, "GET", "*"),
        (400, "GET", "http://u:p@a/x"),
        (400, "GET", "ftp://a/x"),
        (400, "GET", "a:80"),
        (501, "CONNECT", "a:80"),
    ] {
        assert_eq!(gate(method, uri, Version::HTTP_11, &host), wanted, "{method} {uri}");
    }
    let expect = [("host", "a"), ("expect", "foo")];
    assert_eq!(gate("POST", "/", Version::HTTP_11, &expect), 417);
    let expect = [("host", "a"), ("expect", "100-Continue")];
    assert_eq!(gate("POST", "/", Version::HTTP_11, &expect), 200);
}

#[test]
fn the_authority_of_the_target_wins_over_host() {
    for (uri, target) in [
        ("http://evil.example:81/x?y=%2f", "/x?y=%2f"),
        ("http://evil.example:81?y", "/?y"),
        ("http://evil.example:81//a?", "//a?"),
    ] {
        let mut request = Request::builder().uri(uri).header("host", "a").body(()).unwrap();
        to_origin_form(&mut request);
        assert_eq!(request.headers().get("host").unwrap(), "evil.example:81");
        assert_eq!(request.uri().to_string(), target);
    }
}

#[test]
fn every_connection_line_counts() {
    let mut headers = map(&[
        ("connection", "close, X-A"),
        ("connection", "x-b"),
        ("connection", ""),
        ("connection", "host,content-length"),
        ("x-a", "1"),
        ("x-b", "1"),
        ("x-c", "1"),
        ("host", "a"),
        ("content-length", "1"),
        ("keep-alive", "5"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("http2-settings", "AA"),
        ("proxy-authorization", "x"),
    ]);
    strip_hop_by_hop(&mut headers);
    assert_eq!(names(&headers), ["content-length", "host", "x-c"]);
}

#[test]
fn names_of_ours_and_their_twins_are_dropped() {
    let mut headers = map(&[
        ("Oncegate-Record", "1"),
        ("oncegate_record", "1"),
        ("Idempotent_Replayed", "true"),
        ("X-Tenant-Id", "a"),
        ("X_Tenant-Id", "b"),
        ("x_other", "c"),
    ]);
    drop_own(&mut headers);
    drop_twins(&mut headers, &[&HeaderName::from_static("x-tenant-id")]);
    assert_eq!(names(&headers), ["x-tenant-id", "x_other"]);
}

#[test]
fn a_stored_head_keeps_only_what_a_replay_may_say() {
    let answer = map(&[
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("content-length", "2"),
        ("content-type", "a/b"),
        ("date", "x"),
        ("warning", "1"),
        ("warning", "2"),
        ("set-cookie", "s=1"),
        ("www-authenticate", "Basic"),
        ("proxy-authenticate", "Basic"),
        ("oncegate-record", "x"),
        ("trailer", "x-sum"),
    ]);
    let kept = kept(&answer, &[header::SET_COOKIE]);
    assert_eq!(names(&kept), ["content-type", "date", "warning"]);
    let warnings: Vec<_> = kept.get_all("warning").iter().collect();
    assert_eq!(warnings, ["1", "2"]);
}

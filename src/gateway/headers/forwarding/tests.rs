//! What the upstream learns of who asked: both families say the same, and nothing that a stranger says.

use super::super::tests::map;
use super::*;

fn hop() -> Hop {
    let host = Some(HeaderValue::from_static("pub.example"));
    Hop { peer: Some([127, 0, 0, 1].into()), host, https: false }
}

fn trusting() -> Forwarding {
    Forwarding { trusted: vec!["127.0.0.0/8".parse().unwrap()], host: HostPolicy::Keep }
}

/// `name: value` lines of what goes on, but for `Via`.
fn forwarded_lines(forwarding: &Forwarding, hop: &Hop, lines: &[(&str, &str)]) -> Vec<String> {
    let mut headers = map(lines);
    forward(forwarding, hop, &mut headers);
    assert_eq!(headers.remove("via").unwrap(), "1.1 oncegate");
    let line =
        |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
    let mut lines: Vec<_> = headers.iter().map(line).collect();
    lines.sort_unstable();
    lines
}

/// What goes on of what a trusted proxy says: `Forwarded`, `X-Forwarded-For`, `-Host`, `-Proto`, and what else there is.
fn assert_forwarded(lines: &[(&str, &str)], wanted: [&str; 4], others: &[&str]) {
    let [forwarded, addresses, host, proto] = wanted;
    let mut wanted = vec![
        format!("forwarded: {forwarded}"),
        format!("x-forwarded-for: {addresses}"),
        format!("x-forwarded-host: {host}"),
        format!("x-forwarded-proto: {proto}"),
    ];
    wanted.extend(others.iter().map(|line| (*line).to_owned()));
    wanted.sort_unstable();
    assert_eq!(forwarded_lines(&trusting(), &hop(), lines), wanted, "{lines:?}");
}

const OURS: [&str; 4] =
    ["for=127.0.0.1;host=\"pub.example\";proto=http", "127.0.0.1", "pub.example", "http"];

#[test]
fn an_untrusted_peer_says_nothing_of_the_caller() {
    let lines = [
        ("x-forwarded-for", "1.2.3.4"),
        ("x-forwarded-host", "evil"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-port", "1"),
        ("x_forwarded_for", "1.2.3.4"),
        ("x-forwarded-ssl", "on"),
        ("front-end-https", "on"),
        ("x-forwarded-scheme", "https"),
        ("x-forwarded-protocol", "https"),
        ("x-url-scheme", "https"),
        ("x-scheme", "https"),
        ("x-forwarded-prefix", "/evil"),
        ("x_forwarded_prefix", "/evil"),
        ("x-forwarded-server", "evil"),
        ("x-forwarded-by", "evil"),
        ("forwarded", "for=1.2.3.4"),
        ("x-real-ip", "1.2.3.4"),
    ];
    let [forwarded, addresses, host, proto] = OURS;
    let wanted = [
        format!("forwarded: {forwarded}"),
        format!("x-forwarded-for: {addresses}"),
        format!("x-forwarded-host: {host}"),
        format!("x-forwarded-proto: {proto}"),
    ];
    assert_eq!(forwarded_lines(&Forwarding::default(), &hop(), &lines), wanted);
}

#[test]
fn what_a_trusted_peer_says_in_one_family_stands_in_the_other() {
    assert_forwarded(&[], OURS, &[]);
    // X-Forwarded-* alone.
    let lines = [("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https")];
    let made = "for=1.2.3.4;host=\"pub.example\";proto=https, for=127.0.0.1";
    assert_forwarded(&lines, [made, "1.2.3.4, 127.0.0.1", "pub.example", "https"], &[]);
    let lines = [("x-forwarded-for", "1.2.3.4, 10.0.0.1"), ("x-forwarded-host", "shop")];
    let made = "for=1.2.3.4;host=\"shop\";proto=http, for=10.0.0.1, for=127.0.0.1";
    assert_forwarded(&lines, [made, "1.2.3.4, 10.0.0.1, 127.0.0.1", "shop", "http"], &[]);
    let lines = [("x-forwarded-proto", "HTTPS"), ("x-forwarded-host", "shop")];
    let made = "for=127.0.0.1;host=\"shop\";proto=https";
    assert_forwarded(&lines, [made, "127.0.0.1", "shop", "HTTPS"], &[]);
    // Of the scheme under each other name, and what a proxy says of itself.
    for name in ["x-forwarded-scheme", "x-url-scheme", "x-scheme"] {
        let made = "for=127.0.0.1;host=\"pub.example\";proto=https";
        let kept = format!("{name}: https");
        let others = [kept.as_str(), "x-forwarded-prefix: /shop"];
        let lines = [(name, "https"), ("x-forwarded-prefix", "/shop")];
        assert_forwarded(&lines, [made, "127.0.0.1", "pub.example", "https"], &others);
    }
    // Forwarded alone.
    let lines = [("forwarded", "for=1.2.3.4;proto=https;host=shop;by=_x")];
    let wanted = "for=1.2.3.4;proto=https;host=shop;by=_x, for=127.0.0.1";
    assert_forwarded(&lines, [wanted, "1.2.3.4, 127.0.0.1", "shop", "https"], &[]);
    let lines = [("forwarded", "for=1.2.3.4"), ("forwarded", "For=10.0.0.1;Proto=https")];
    let wanted = "for=1.2.3.4, For=10.0.0.1;Proto=https, for=127.0.0.1;host=\"pub.example\"";
    assert_forwarded(&lines, [wanted, "1.2.3.4, 10.0.0.1, 127.0.0.1", "pub.example", "https"], &[]);
    let lines = [("forwarded", "proto=https")];
    let wanted = "proto=https, for=127.0.0.1;host=\"pub.example\"";
    assert_forwarded(&lines, [wanted, "127.0.0.1", "pub.example", "https"], &[]);
}

#[test]
fn addresses_are_written_as_each_family_writes_them() {
    for (item, value, bare) in [
        ("1.2.3.4", "1.2.3.4", "1.2.3.4"),
        ("1.2.3.4:5678", "\"1.2.3.4:5678\"", "1.2.3.4"),
        ("2001:db8::1", "\"[2001:db8::1]\"", "2001:db8::1"),
        ("[2001:db8::1]", "\"[2001:db8::1]\"", "2001:db8::1"),
        ("[2001:db8::1]:80", "\"[2001:db8::1]:80\"", "2001:db8::1"),
        ("unknown", "unknown", "unknown"),
        ("_hidden", "_hidden", "unknown"),
    ] {
        let end = ";host=\"pub.example\";proto=http, for=127.0.0.1";
        let (made, list) = (format!("for={value}{end}"), format!("{item}, 127.0.0.1"));
        assert_forwarded(&[("x-forwarded-for", item)], [&made, &list, "pub.example", "http"], &[]);
        let said = format!("for={value};host=\"h:1\";proto=http");
        let (both, list) = (format!("{said}, for=127.0.0.1"), format!("{bare}, 127.0.0.1"));
        assert_forwarded(&[("forwarded", &said)], [&both, &list, "h:1", "http"], &[]);
    }
    let mapped = Hop { peer: Some("::ffff:10.0.0.9".parse().unwrap()), ..hop() };
    let lines = forwarded_lines(&Forwarding::default(), &mapped, &[]);
    assert_eq!(lines[1], "x-forwarded-for: 10.0.0.9");
    let six = Hop { peer: Some("::1".parse().unwrap()), host: None, https: true };
    let lines = forwarded_lines(&Forwarding::default(), &six, &[]);
    let wanted = ["forwarded: for=\"[::1]\";proto=https", "x-forwarded-for: ::1"];
    assert_eq!(lines, [&wanted[..], &["x-forwarded-proto: https"]].concat());
}

#[test]
fn of_lists_the_first_value_is_the_callers() {
    let lines = [
        ("x-forwarded-for", "1.2.3.4"),
        ("x-forwarded-for", "::5"),
        ("x-forwarded-proto", "https, http"),
        ("x-forwarded-host", "shop, inner"),
    ];
    let made = "for=1.2.3.4;host=\"shop\";proto=https, for=\"[::5]\", for=127.0.0.1";
    assert_forwarded(&lines, [made, "1.2.3.4, ::5, 127.0.0.1", "shop, inner", "https, http"], &[]);
    let said = "for=1.2.3.4;proto=https;host=shop, for=_x;proto=http;host=inner";
    let wanted = format!("{said}, for=127.0.0.1");
    let addresses = "1.2.3.4, unknown, 127.0.0.1";
    assert_forwarded(&[("forwarded", said)], [&wanted, addresses, "shop", "https"], &[]);
}

#[test]
fn families_that_agree_stay_and_a_forwarded_that_does_not_is_made_anew() {
    let legacy = [("x-forwarded-for", "1.2.3.4:9"), ("x-forwarded-proto", "https")];
    let end = ["1.2.3.4:9, 127.0.0.1", "pub.example", "https"];
    for agrees in
        ["for=1.2.3.4", "for=1.2.3.4;by=_x;Proto=https", "for=\"1.2.3.4:9\";host=pub.example"]
    {
        let mut headers = map(&legacy);
        headers.append("forwarded", HeaderValue::from_static(agrees));
        forward(&trusting(), &hop(), &mut headers);
        let whole = headers["forwarded"].to_str().unwrap();
        assert!(whole.starts_with(&format!("{agrees}, for=127.0.0.1")), "{whole}");
        assert_eq!(whole.matches("roto=https").count(), 1, "{whole}");
        assert_eq!(whole.matches("host=").count(), 1, "{whole}");
    }
    let made = "for=\"1.2.3.4:9\";host=\"pub.example\";proto=https, for=127.0.0.1";
    for differs in [
        "for=6.6.6.6",
        "for=1.2.3.4, for=6.6.6.6",
        "for=unknown",
        "for=1.2.3.4;proto=http",
        "host=evil",
        "for=1.2.3.4;host=evil;proto=https",
    ] {
        let lines = [&legacy[..], &[("forwarded", differs)]].concat();
        assert_forwarded(&lines, [made, end[0], end[1], end[2]], &[]);
    }
    // Who says only the scheme has not vouched for what it passed on.
    let lines = [("x-forwarded-proto", "https"), ("forwarded", "for=6.6.6.6")];
    let made = "for=127.0.0.1;host=\"pub.example\";proto=https";
    assert_forwarded(&lines, [made, "127.0.0.1", "pub.example", "https"], &[]);
}

#[test]
fn a_line_that_does_not_parse_is_dropped_and_vouches_for_nothing() {
    for malformed in [
        "for=\"[::1",
        "for=::1",
        "for",
        "for=\"a b\"",
        "for=1.2.3.4, =x",
        "for=1.2.3.4;proto=\"h ttp\"",
        "host=\"a/b\"",
        "host=\"a\\\"b\"",
        "for=1.2.3.4:99999",
        "for=\"\"",
    ] {
        assert_forwarded(&[("forwarded", malformed)], OURS, &[]);
    }
    for (name, malformed) in [
        ("x-forwarded-for", "a b"),
        ("x-forwarded-for", "1.2.3.4, "),
        ("x-forwarded-for", "1.2.3.4:x"),
        ("x-forwarded-for", "1.2.3.400"),
        ("x-forwarded-proto", "ht tp"),
        ("x-forwarded-proto", ""),
        ("x-forwarded-host", "a/b"),
        ("x-forwarded-host", "a\"b"),
        ("x-forwarded-host", "a, "),
        ("x-forwarded-port", "70000"),
        ("x-forwarded-port", "x"),
        ("x-real-ip", "x"),
        ("x-forwarded-ssl", "1"),
    ] {
        let lines = [(name, malformed), ("forwarded", "for=6.6.6.6;host=evil;proto=https")];
        assert_forwarded(&lines, OURS, &[]);
    }
}

#[test]
fn the_port_belongs_to_the_host() {
    let https = ("x-forwarded-proto", "https");
    for (port, host, wanted) in [
        ("443", "shop", "shop"),
        ("8443", "shop", "shop:8443"),
        ("8443", "shop:8443", "shop:8443"),
        ("8443", "[::1]", "[::1]:8443"),
    ] {
        let lines = [https, ("x-forwarded-host", host), ("x-forwarded-port", port)];
        let made = format!("for=127.0.0.1;host=\"{wanted}\";proto=https");
        let others = format!("x-forwarded-port: {port}");
        assert_forwarded(&lines, [&made, "127.0.0.1", host, "https"], &[&others]);
    }
    let lines = [https, ("x-forwarded-port", "8443")];
    let made = "for=127.0.0.1;host=\"pub.example:8443\";proto=https";
    let port = "x-forwarded-port: 8443";
    assert_forwarded(&lines, [made, "127.0.0.1", "pub.example:8443", "https"], &[port]);
    let lines = [https, ("x-forwarded-host", "shop:1"), ("x-forwarded-port", "2")];
    let made = "for=127.0.0.1;host=\"shop:1\";proto=https";
    assert_forwarded(&lines, [made, "127.0.0.1", "shop:1", "https"], &[]);
}

#[test]
fn other_names_for_the_scheme_and_the_address_say_the_same_or_go() {
    for (name, value) in [
        ("x-forwarded-ssl", "on"),
        ("front-end-https", "On"),
        ("x-forwarded-scheme", "https"),
        ("x-forwarded-protocol", "https"),
        ("x-url-scheme", "https"),
    ] {
        let made = "for=127.0.0.1;host=\"pub.example\";proto=https";
        let line = format!("{name}: {value}");
        assert_forwarded(&[(name, value)], [made, "127.0.0.1", "pub.example", "https"], &[&line]);
        assert_forwarded(&[(name, value), ("x-forwarded-proto", "http")], OURS, &[]);
    }
    let made = "for=1.2.3.4;host=\"pub.example\";proto=http, for=127.0.0.1";
    let wanted = [made, "1.2.3.4, 127.0.0.1", "pub.example", "http"];
    assert_forwarded(&[("x-real-ip", "1.2.3.4")], wanted, &["x-real-ip: 1.2.3.4"]);
    let lines = [("x-real-ip", "1.2.3.4"), ("x-forwarded-for", "1.2.3.4")];
    assert_forwarded(&lines, wanted, &["x-real-ip: 1.2.3.4"]);
    assert_forwarded(&[("x-real-ip", "6.6.6.6"), ("x-forwarded-for", "1.2.3.4")], wanted, &[]);
}

#[test]
fn a_unix_socket_is_trusted_and_has_no_address() {
    let unix = Hop { peer: None, ..hop() };
    let host_and_proto = ["x-forwarded-host: pub.example", "x-forwarded-proto: https"];
    for (lines, forwarded, addresses) in [
        (
            vec![("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https")],
            "for=1.2.3.4;host=\"pub.example\";proto=https",
            Some("1.2.3.4"),
        ),
        (
            vec![("forwarded", "for=1.2.3.4;proto=https")],
            "for=1.2.3.4;proto=https, host=\"pub.example\"",
            Some("1.2.3.4"),
        ),
        (
            vec![("x-forwarded-proto", "https")],
            "for=unknown;host=\"pub.example\";proto=https",
            None,
        ),
    ] {
        let mut wanted = vec![format!("forwarded: {forwarded}")];
        wanted.extend(addresses.map(|list| format!("x-forwarded-for: {list}")));
        wanted.extend(host_and_proto.iter().map(|line| (*line).to_owned()));
        assert_eq!(forwarded_lines(&Forwarding::default(), &unix, &lines), wanted, "{lines:?}");
    }
}

#[test]
fn networks_are_read_and_matched() {
    let check = |network: &str, address: &str| {
        network.parse::<Network>().unwrap().contains(address.parse().unwrap())
    };
    assert!(check("10.0.0.0/8", "10.255.0.1"));
    assert!(!check("10.0.0.0/8", "11.0.0.1"));
    assert!(check("0.0.0.0/0", "11.0.0.1"));
    assert!(!check("0.0.0.0/0", "::1"));
    assert!(check("10.0.0.1", "::ffff:10.0.0.1"));
    assert!(check("fd00::/8", "fd12::1"));
    assert!(!check("::1", "::2"));
    for wrong in ["", "x", "10.0.0.0/33", "::/129", "10.0.0.0/-1", "10.0.0.0/"] {
        assert!(wrong.parse::<Network>().is_err(), "{wrong}");
    }
}

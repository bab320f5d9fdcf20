//! Whose request it is, and under which key.

use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn recipe(tenant: Source, derive: &[&str]) -> Recipe {
    let parts = derive.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    Recipe {
        key_header: HeaderName::from_static("idempotency-key"),
        key_required: true,
        forward_key: true,
        derive_key: (!parts.is_empty()).then(|| Derive::parse(&parts).unwrap()),
        tenant,
    }
}

fn headers(lines: &[(&str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

fn key(line: &[u8]) -> Result<String, Refusal> {
    let recipe = recipe(Source::Host, &[]);
    let key = read_key(&recipe, &headers(&[("idempotency-key", line)]))?;
    Ok(key.unwrap().as_str().to_owned())
}

fn refused(line: &[u8]) -> bool {
    matches!(key(line), Err(Refusal::KeyInvalid(_)))
}

#[test]
fn d02_blank_keys_are_refused_and_an_absent_one_is_absent() {
    for blank in [&b""[..], b"   ", b"\"\"", b"\" \"", b"\t"] {
        assert!(refused(blank), "{blank:?}");
    }
    assert_eq!(read_key(&recipe(Source::Host, &[]), &HeaderMap::new()), Ok(None));
}

#[test]
fn d03_quoted_and_bare_are_one_key() {
    assert_eq!(key(b"\"k\""), key(b" k "));
    assert_eq!(key(br#""a\"b\\""#), key(br#"a"b\"#));
    assert_eq!(key(b"\"a,b\"").unwrap(), "a,b");
    assert_eq!(key(b"order:7:x").unwrap(), "order:7:x");
    for bad in [
        &br#""k";p=1"#[..],
        b"\"k",
        b"\"",
        b":YWJj:",
        b"::",
        b"\"k\", \"k\"",
        br#""a\x""#,
        br#""k"x"#,
        br#""k\"#,
    ] {
        assert!(refused(bad), "{bad:?}");
    }
}

#[test]
fn d04_repeated_lines_and_lists_are_refused() {
    let two = headers(&[("idempotency-key", b"k"), ("idempotency-key", b"k")]);
    assert!(matches!(read_key(&recipe(Source::Host, &[]), &two), Err(Refusal::KeyInvalid(_))));
    assert!(refused(b"a,b"));
}

#[test]
fn d05_the_length_is_bounded_in_characters() {
    assert!(key(&[b'x'; 255]).is_ok());
    assert!(refused(&[b'x'; 256]));
    assert!(refused(&[b'x'; 64_000]));
    assert!(key(format!("\"{}\"", "\\\\".repeat(255)).as_bytes()).is_ok());
}

#[test]
fn d06_only_visible_ascii() {
    for bad in [&b"a\tb"[..], b"\xc3\xa9", b"\xe9", b"a\x80"] {
        assert!(refused(bad), "{bad:?}");
    }
    for good in ["<script>", "'; drop", "%00", "../"] {
        assert_eq!(key(good.as_bytes()).unwrap(), good);
    }
}

#[test]
fn a_sent_key_never_equals_a_derived_one() {
    assert!(refused(b"derived:[1]"));
    assert!(refused(b"\"derived:[1]\""));
}

fn derived(parts: &[&str], body: &str) -> Option<String> {
    let lines: [(&str, &[u8]); 4] =
        [("x-ref", b"r 1"), ("x-two", b"1"), ("x-two", b"2"), ("x-empty", b"")];
    let headers = headers(&lines);
    let params = Params::new(vec![("account".to_owned(), "a/1".to_owned())]);
    let target = "/a%2f1?ref=a%20b&d=1&d=2";
    let asked = RequestHead {
        method: &Method::POST,
        target,
        headers: &headers,
        params: &params,
        host: None,
        token: None,
    };
    derive_key(&recipe(Source::Host, parts), &asked, body.as_bytes())
        .map(|key| key.as_str().to_owned())
}

#[test]
fn derived_keys_need_all_their_parts() {
    let all = ["$.ref", "$.n[1]", "header:X-Ref", "path:account", "query:ref"];
    let expected = r#"derived:["x",90071992547409930,"r 1","a/1","a b"]"#;
    let body = r#"{"ref":"x","n":[0,9.007199254740993e16]}"#;
    assert_eq!(derived(&all, body).as_deref(), Some(expected));
    for ref_ in ["null", "{}", "[1]", "\" \"", "\"\""] {
        assert_eq!(derived(&["$.ref"], &format!("{{\"ref\":{ref_}}}")), None, "{ref_}");
    }
    assert_eq!(derived(&["$.ref"], "{}"), None);
    assert_eq!(derived(&["$.ref"], "oops"), None);
    for part in ["header:X-None", "header:X-Two", "header:X-Empty", "path:none", "query:d"] {
        assert_eq!(derived(&["$.ref", part], r#"{"ref":1}"#), None, "{part}");
    }
    assert_ne!(derived(&["$.ref"], r#"{"ref":1}"#), derived(&["$.ref"], r#"{"ref":"1"}"#));
    assert_eq!(derived(&["$.ref"], r#"{"ref":1.0}"#), derived(&["$.ref"], r#"{"ref":1}"#));
}

#[test]
fn long_and_foreign_derived_keys_are_hashed() {
    let long = format!(r#"{{"ref":"{}"}}"#, "x".repeat(300));
    for body in [long.as_str(), r#"{"ref":"é"}"#] {
        let key = derived(&["$.ref"], body).unwrap();
        assert!(key.starts_with("derived:sha256:") && key.len() == 79, "{key}");
    }
}

#[test]
fn derive_refuses_parts_that_name_several_values() {
    for part in ["$..a", "$.a[*]", "$.a[0,1]", "$.a[0:2]", "$.a[?@.b]", "$.", "a", "path:"] {
        assert!(Derive::parse(&[part.to_owned()]).is_err(), "{part}");
    }
    assert!(Derive::parse(&["$['a,b:*']".to_owned()]).is_ok());
    assert!(Derive::parse(&[]).is_err());
}

fn tenant_of(source: Source, lines: &[(&str, &[u8])], host: Option<&str>) -> Option<String> {
    let headers = headers(lines);
    let params = Params::new(vec![("account".to_owned(), "acme".to_owned())]);
    let asked = RequestHead {
        method: &Method::POST,
        target: "/",
        headers: &headers,
        params: &params,
        host,
        token: None,
    };
    let digest = DigestKey::from_bytes(b"secret");
    match read_tenant(&recipe(source, &[]), &asked, &digest) {
        Ok(tenant) => Some(tenant.as_str().to_owned()),
        Err(refusal) => {
            assert!(matches!(refusal, Refusal::TenantMissing(_)));
            None
        }
    }
}

#[test]
fn d09_a_tenant_is_one_visible_value_or_the_request_is_refused() {
    let header = Source::Header(HeaderName::from_static("x-tenant"));
    let from = |lines: &[(&str, &[u8])]| tenant_of(header.clone(), lines, None);
    assert_eq!(from(&[("x-tenant", "Zoë".as_bytes())]).as_deref(), Some("Zoë"));
    assert_eq!(from(&[]), None);
    assert_eq!(from(&[("x-tenant", b" ")]), None);
    assert_eq!(from(&[("x-tenant", b"\xff")]), None);
    assert_eq!(from(&[("x-tenant", b"a"), ("x-tenant", b"a")]), None);
    assert_eq!(from(&[("x-tenant", &[b'x'; 256])]), None);
    let path = |name: &str| tenant_of(Source::Path(name.to_owned()), &[], None);
    assert_eq!(path("account").as_deref(), Some("acme"));
    assert_eq!(path("other"), None);
}

#[test]
fn hosts_are_compared_without_case_and_port() {
    for (host, tenant) in
        [("A.Example:8080", "a.example"), ("a.example.", "a.example"), ("[::1]:80", "[::1]")]
    {
        assert_eq!(tenant_of(Source::Host, &[], Some(host)).as_deref(), Some(tenant));
    }
    assert_eq!(tenant_of(Source::Host, &[], None), None);
    assert_eq!(tenant_of(Source::Host, &[], Some(":80")), None);
}

#[test]
fn credentials_name_a_tenant_without_being_shown() {
    let basic = |value: &[u8]| tenant_of(Source::BasicUser, &[("authorization", value)], None);
    assert_eq!(basic(b"Basic YWxpY2U6cHc=").as_deref(), Some("alice"));
    assert_eq!(basic(b"basic YWxpY2U6b3RoZXI").as_deref(), Some("alice"));
    for bad in [&b"Bearer x"[..], b"Basic", b"Basic ***", b"Basic YWxpY2U=", b"Basic OnB3"] {
        assert_eq!(basic(bad), None, "{bad:?}");
    }
    let token = |value: &[u8]| tenant_of(Source::Credential, &[("authorization", value)], None);
    let one = token(b"Bearer SECRET").unwrap();
    assert!(one.len() == 32 && !one.contains("SECRET"));
    assert_ne!(Some(one), token(b"Bearer OTHER"));
    assert_eq!(tenant_of(Source::Credential, &[], None), None);
}

#[test]
fn a_caller_is_known_by_all_of_its_credentials_or_by_none() {
    let digest = DigestKey::from_bytes(b"secret");
    let of = |lines: &[&[u8]]| {
        let lines: Vec<_> = lines.iter().map(|line| ("authorization", *line)).collect();
        caller(&headers(&lines), None, &digest)
    };
    assert_eq!((of(&[]), of(&[b" "])), (None, None));
    let all = [of(&[b"Bearer a"]), of(&[b"Bearer b"]), of(&[b"Bearer a", b"Bearer b"])];
    for (place, one) in all.iter().enumerate() {
        assert!(one.is_some() && !all[..place].contains(one), "{all:?}");
    }
    assert_eq!(of(&[b"Bearer a"]), of(&[b" Bearer a "]));
}

#[test]
fn a_bearer_token_is_one_word_of_one_header() {
    let of = |lines: &[&[u8]]| {
        let lines: Vec<_> = lines.iter().map(|line| ("authorization", *line)).collect();
        bearer(&headers(&lines)).map(|token| token.map(str::to_owned))
    };
    assert_eq!(of(&[]), Ok(None));
    for good in [&b"Bearer a.b.c"[..], b"bearer  a.b.c", b"BEARER a.b.c "] {
        assert_eq!(of(&[good]), Ok(Some("a.b.c".to_owned())), "{good:?}");
    }
    for bad in
        [&b"Basic YTpi"[..], b"Bearer", b"Bearer a b", b"Bearer a,Bearer b", b"a.b.c", b"\xff"]
    {
        assert!(of(&[bad]).is_err(), "{bad:?}");
    }
    assert!(of(&[b"Bearer a", b"Bearer a"]).is_err());
}

#[test]
fn digests_are_hmac_sha256_cut_in_half() {
    // RFC 4231, cases 2 and 6.
    let short = DigestKey::from_bytes(b"Jefe").digest(b"what do ya want for nothing?");
    assert_eq!(short, "5bdcc146bf60754e6a042426089575c7");
    let long = DigestKey::from_bytes(&[0xaa; 131]);
    let text = b"Test Using Larger Than Block-Size Key - Hash Key First";
    assert_eq!(long.digest(text), "60e431591ee0b67f0d8a26aacbf5b77f");
}

proptest! {
    #[test]
    fn no_header_panics(line in prop::collection::vec(any::<u8>(), 0..40), host: String) {
        if let Ok(value) = HeaderValue::from_bytes(&line) {
            let lines = [("authorization", value.as_bytes())];
            let _key = key(value.as_bytes());
            let _user = tenant_of(Source::BasicUser, &lines, None);
            let _host = tenant_of(Source::Host, &lines, Some(&host));
        }
    }
}

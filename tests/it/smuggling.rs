//! Two opinions about where a request ends, on a keyed route. Whatever a caller
//! sends, one key makes at most one request upstream, and what is refused leaves no record.

use crate::support::process::{self, Gateway};
use crate::support::raw::{End, NOT_CHUNKED, Raw, headers, status};
use crate::support::rig::{self, Place, Which};
use crate::support::upstream::{OK, Reply, Upstream};

struct Setup {
    upstream: Upstream,
    place: Place,
    gateway: Gateway,
}

async fn setup() -> Setup {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), "");
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    Setup { upstream, place, gateway }
}

fn keyed(key: &str, rest: impl AsRef<[u8]>) -> Vec<u8> {
    let head = format!(
        "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: {key}\r\n"
    );
    [head.as_bytes(), rest.as_ref()].concat()
}

const EVIL: &str = "GET /evil HTTP/1.1\r\nHost: a\r\n\r\n";

impl Setup {
    /// Refused with one answer; the connection ends, the upstream sees nothing, no record is made.
    async fn refuses(&self, request: &[u8], statuses: &[u16]) {
        let shown = String::from_utf8_lossy(request).into_owned();
        let mut raw = Raw::sending(self.gateway.addr, request).await;
        raw.send(EVIL).await;
        let (answer, end) = raw.rest().await;
        assert!(statuses.contains(&status(&answer)), "{shown:?} got {answer:?}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{shown:?} got {answer:?}");
        assert_ne!(end, End::StillOpen, "{shown:?}");
        assert_eq!(self.upstream.connections(), 0, "{shown:?}");
        assert_eq!(self.place.records().await, 0, "{shown:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_length_and_chunks_together_one_request_goes_on_framed_anew() {
    let setup = setup().await;
    let cases = [
        "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n",
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: CHUNKED\r\n\r\n2;x=y\r\nhi\r\n0\r\n\r\n",
    ];
    for (count, case) in cases.into_iter().enumerate() {
        let request = [keyed(&format!("k{count}"), case), EVIL.into()].concat();
        let (answer, end) = Raw::sending(setup.gateway.addr, request).await.rest().await;
        assert_ne!(end, End::StillOpen, "{case:?}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{case:?}: {answer}");
        let seen = setup.upstream.seen();
        assert_eq!(seen.len(), count + 1, "{case:?}");
        let head = &seen[count].head;
        let length = if case.contains("hi") { "2" } else { "0" };
        assert_eq!(headers(head, "content-length"), [length], "{case:?}: {head}");
        assert!(headers(head, "transfer-encoding").is_empty(), "{case:?}: {head}");
        assert_eq!(setup.place.records().await, count as i64 + 1);
    }
    assert!(setup.upstream.seen().iter().all(|seen| seen.target() == "/orders"));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_chunked_is_a_transfer_coding_here_too() {
    let setup = setup().await;
    for coding in NOT_CHUNKED {
        let rest = format!("Transfer-Encoding: {coding}\r\n\r\n2\r\nhi\r\n0\r\n\r\n");
        setup.refuses(&keyed("k", rest), &[400, 501]).await;
        // A length beside it makes it no better.
        let rest = format!("Content-Length: 2\r\nTransfer-Encoding: {coding}\r\n\r\nhi");
        setup.refuses(&keyed("k", rest), &[400, 501]).await;
    }
    let rest = b"Transfer-Encoding: \xa0chunked\r\n\r\n0\r\n\r\n";
    setup.refuses(&keyed("k", rest), &[400, 501]).await;
    let old = String::from_utf8(keyed("k", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")).unwrap();
    setup.refuses(old.replace("HTTP/1.1", "HTTP/1.0").as_bytes(), &[400]).await;
    let spaced = keyed("k", "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n");
    setup.refuses(&spaced, &[400]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_length_is_one_decimal_number_here_too() {
    let setup = setup().await;
    for lines in [
        "Content-Length: \r\nContent-Length: 5",
        "Content-Length: 0\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 6",
        "Content-Length: +2",
        "Content-Length: -2",
        "Content-Length: 0x2",
        "Content-Length: 2 2",
        "Content-Length: 2.0",
        "Content-Length : 5",
        "Content-Length: 18446744073709551616",
    ] {
        setup.refuses(&keyed("k", format!("{lines}\r\n\r\nhello")), &[400, 431]).await;
    }
    // Twice the same may pass, as one.
    let twice = keyed("same", "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello");
    let answer = Raw::sending(setup.gateway.addr, twice).await.answer().await;
    let seen = setup.upstream.seen();
    match status(&answer) {
        200 => assert_eq!(headers(&seen[0].head, "content-length"), ["5"]),
        status => assert_eq!((status, seen.len()), (400, 0), "{answer}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_lines_in_the_head_are_refused() {
    let setup = setup().await;
    let end = "Content-Length: 2\r\n\r\nhi";
    for (key, lines) in [
        // The key itself, folded: there is no second opinion about which key it is.
        ("a\r\n b", ""),
        ("\r\n folded", ""),
        ("a\r\n\tb", ""),
        ("a\rX-Evil: 1", ""),
        ("a\0b", ""),
        ("k", "X-A: a\r\n b\r\n"),
        ("k", "X-A: a\x00b\r\n"),
        ("k", "no colon\r\n"),
        ("k", ": x\r\n"),
        ("k", "X A: y\r\n"),
        ("k", "Host: b\r\n"),
        ("k", "Idempotency-Key: l\r\n"),
    ] {
        let request = keyed(key, format!("{lines}{end}"));
        let mut raw = Raw::sending(setup.gateway.addr, &request).await;
        let answer = raw.answer().await;
        assert_eq!(status(&answer), 400, "{key:?} {lines:?}: {answer}");
        assert_eq!(setup.upstream.connections(), 0, "{key:?} {lines:?}");
        assert_eq!(setup.place.records().await, 0, "{key:?} {lines:?}");
    }
    // Blanks around the key are no part of it: one key, here and upstream.
    for key in ["k", "k  ", " \tk\t"] {
        let answer = Raw::sending(setup.gateway.addr, keyed(key, end)).await.answer().await;
        assert_eq!(status(&answer), 200, "{key:?}: {answer}");
    }
    let seen = setup.upstream.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(headers(&seen[0].head, "idempotency-key"), ["k"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_chunks_never_make_a_whole_request() {
    let setup = setup().await;
    for chunks in [
        "2;\nxx\r\nhi\r\n0\r\n\r\n",
        "2;a=b\r\r\nhi\r\n0\r\n\r\n",
        "2\r;a\r\nhi\r\n0\r\n\r\n",
        "-2\r\nhi\r\n0\r\n\r\n",
        "0x2\r\nhi\r\n0\r\n\r\n",
        "2\r\nhiX\r\n0\r\n\r\n",
        "fffffffffffffffff\r\nhi\r\n0\r\n\r\n",
    ] {
        let request = keyed("k", format!("Transfer-Encoding: chunked\r\n\r\n{chunks}"));
        let mut raw = Raw::sending(setup.gateway.addr, request).await;
        raw.send(EVIL).await;
        let (_, end) = raw.rest().await;
        assert_ne!(end, End::StillOpen, "{chunks:?}");
        assert_eq!(setup.upstream.connections(), 0, "{chunks:?}");
        assert_eq!(setup.place.records().await, 0, "{chunks:?}");
    }
}

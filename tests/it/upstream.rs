//! A request that is reserved is sent at most once, and it is known whether a byte of it went out.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use oncegate::gateway::upstream::{Answer, DialError, Dialed, SendError, Settings, Upstream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::raw::{PATIENCE, headers};
use crate::support::secure::Certificate;
use crate::support::upstream::{OK, Reply, Upstream as Scripted};

fn upstream(addr: SocketAddr) -> Upstream {
    Upstream::new(Settings::at(format!("http://{addr}").parse().unwrap())).unwrap()
}

fn post(body: &'static str) -> Request<Full<Bytes>> {
    Request::post("/orders").header("host", "a").body(Full::from(body)).unwrap()
}

async fn send(dialed: Dialed) -> Result<Response<Answer>, SendError> {
    tokio::time::timeout(PATIENCE, dialed.send(post("hi"), || true)).await.unwrap()
}

/// A connection, dialed, and its other end.
async fn pair() -> (Dialed, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = upstream(listener.local_addr().unwrap());
    let (dialed, accepted) = tokio::join!(upstream.dial(), listener.accept());
    (dialed.unwrap(), accepted.unwrap().0)
}

async fn whole(answer: Response<Answer>) -> Result<String, String> {
    let (head, body) = answer.into_parts();
    let bytes = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
    Ok(format!("{} {}", head.status.as_u16(), String::from_utf8_lossy(&bytes)))
}

#[tokio::test]
async fn a_refused_connection_has_sent_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    assert!(matches!(upstream(addr).dial().await, Err(DialError::Connect(_))));
}

#[tokio::test]
async fn a_name_without_address_has_sent_nothing() {
    let url = "http://no-such-name.invalid:80".parse().unwrap();
    let mut settings = Settings::at(url);
    settings.connect_timeout = PATIENCE;
    let dialed = Upstream::new(settings).unwrap().dial().await;
    assert!(matches!(dialed, Err(DialError::Resolve(_))));
}

/// A TLS server with a certificate of its own, and the settings of an upstream that trusts it.
struct Secure {
    listener: TcpListener,
    certificate: Certificate,
    settings: Settings,
}

async fn secure(name: &str) -> Secure {
    let certificate = Certificate::of(name);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut settings = Settings::at(format!("https://localhost:{port}").parse().unwrap());
    settings.connect_timeout = PATIENCE;
    settings.ca_file = Some(certificate.ca_file.clone());
    Secure { listener, certificate, settings }
}

#[tokio::test]
async fn over_tls_only_an_answer_that_ends_lawfully_is_whole() {
    let secure = secure("localhost").await;
    let upstream = Upstream::new(secure.settings.clone()).unwrap();
    for (bytes, closes_well, is_whole) in [
        (OK, false, true),
        ("HTTP/1.1 200 OK\r\n\r\nok", true, true),
        ("HTTP/1.1 200 OK\r\n\r\nok", false, false),
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", true, false),
    ] {
        let server = async {
            let (tcp, _) = secure.listener.accept().await.unwrap();
            let mut tls = secure.certificate.acceptor.accept(tcp).await.unwrap();
            let mut request = vec![0; 2000];
            let read = tls.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"POST /orders HTTP/1.1\r\n"));
            tls.write_all(bytes.as_bytes()).await.unwrap();
            tls.flush().await.unwrap();
            if closes_well {
                tls.shutdown().await.unwrap();
            }
        };
        let client = async { send(upstream.dial().await.unwrap()).await };
        let ((), answer) = tokio::join!(server, client);
        let body = whole(answer.unwrap()).await;
        assert_eq!(body.as_deref().ok(), is_whole.then_some("200 ok"), "{bytes:?}");
    }
}

#[tokio::test]
async fn a_certificate_of_somebody_else_means_nothing_was_sent() {
    let secure = secure("other.example").await;
    let upstream = Upstream::new(secure.settings.clone()).unwrap();
    let server = async {
        let (tcp, _) = secure.listener.accept().await.unwrap();
        assert!(secure.certificate.acceptor.accept(tcp).await.is_err());
    };
    let ((), dialed) = tokio::join!(server, upstream.dial());
    assert!(matches!(dialed, Err(DialError::Tls(_))));
}

#[tokio::test]
async fn no_answer_to_the_tls_handshake_is_a_dial_that_took_too_long() {
    let mut secure = secure("localhost").await;
    secure.settings.connect_timeout = Duration::from_millis(300);
    let upstream = Upstream::new(secure.settings.clone()).unwrap();
    assert!(matches!(upstream.dial().await, Err(DialError::TimedOut)));
}

#[tokio::test]
async fn a_fin_before_the_send_means_nothing_was_sent() {
    let (dialed, other) = pair().await;
    drop(other);
    assert!(matches!(send(dialed).await, Err(SendError::NothingSent(_))));
}

#[tokio::test]
async fn a_reset_before_the_send_means_nothing_was_sent() {
    let (dialed, other) = pair().await;
    other.set_zero_linger().unwrap();
    drop(other);
    assert!(matches!(send(dialed).await, Err(SendError::NothingSent(_))));
}

#[tokio::test]
async fn unasked_bytes_before_the_send_mean_nothing_was_sent() {
    let (dialed, mut other) = pair().await;
    other.write_all(OK.as_bytes()).await.unwrap();
    let result = send(dialed).await;
    assert!(matches!(result, Err(SendError::NothingSent(_))), "{:?}", result.err());
}

#[tokio::test]
async fn a_fin_after_the_request_means_unknown() {
    let scripted = Scripted::always(Reply::fin("")).await;
    let dialed = upstream(scripted.addr).dial().await.unwrap();
    assert!(matches!(send(dialed).await, Err(SendError::Broken(_))));
    assert_eq!(scripted.seen().len(), 1);
}

#[tokio::test]
async fn a_reset_after_the_request_means_unknown() {
    let scripted = Scripted::always(Reply::reset("")).await;
    let dialed = upstream(scripted.addr).dial().await.unwrap();
    assert!(matches!(send(dialed).await, Err(SendError::Broken(_))));
    assert_eq!(scripted.seen().len(), 1);
}

#[tokio::test]
async fn what_may_not_be_written_is_held_and_nothing_arrives() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let dialed = upstream(scripted.addr).dial().await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let may_write = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        false
    };
    let result = dialed.send(post("hi"), may_write).await;
    assert!(matches!(result, Err(SendError::Held)));
    scripted.wait_for_closed(1).await;
    assert_eq!((scripted.seen().len(), scripted.cut()), (0, 0));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn permission_is_asked_once_before_the_first_byte() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let dialed = upstream(scripted.addr).dial().await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let body = Full::from(vec![b'x'; 5_000_000]);
    let request = Request::post("/orders").header("host", "a").body(body).unwrap();
    let may_write = move || counter.fetch_add(1, Ordering::SeqCst) == 0;
    let answer = dialed.send(request, may_write).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn each_dial_is_a_connection_of_its_own_and_closes_with_its_answer() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let upstream = upstream(scripted.addr);
    for round in 1..=20 {
        let answer = send(upstream.dial().await.unwrap()).await.unwrap();
        assert_eq!(whole(answer).await.unwrap(), "200 ok");
        scripted.wait_for_closed(round).await;
    }
    let connections: Vec<_> = scripted.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!(connections, (1..=20).collect::<Vec<_>>());
}

/// An upstream whose reserved requests may go out on a connection that has been idle for less than `limit`.
fn reusing(addr: SocketAddr, limit: Duration) -> Upstream {
    let mut settings = Settings::at(format!("http://{addr}").parse().unwrap());
    settings.reuse_for_keyed = Some(limit);
    settings.idle_timeout = PATIENCE;
    Upstream::new(settings).unwrap()
}

/// Dials until the connection is one that was used before. Parking is a task of its own.
async fn dial_reused(upstream: &Upstream, scripted: &Scripted, connections: usize) -> Dialed {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let dialed = upstream.dial().await.unwrap();
    assert_eq!(scripted.connections(), connections, "a connection that was there is used");
    dialed
}

#[tokio::test]
async fn where_it_is_allowed_a_reserved_request_goes_out_on_a_connection_that_was_used_before() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let upstream = reusing(scripted.addr, PATIENCE);
    for _ in 0..10 {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let answer = send(upstream.dial().await.unwrap()).await.unwrap();
        assert_eq!(whole(answer).await.unwrap(), "200 ok");
    }
    let connections: Vec<_> = scripted.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!(connections, [1; 10]);
    // One that has rested for too long is not taken.
    let strict = reusing(scripted.addr, Duration::ZERO);
    for _ in 0..2 {
        assert_eq!(
            whole(send(strict.dial().await.unwrap()).await.unwrap()).await.unwrap(),
            "200 ok"
        );
    }
    let connections: Vec<_> = scripted.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!(connections.get(10..), Some([2, 3].as_slice()));
}

#[tokio::test]
async fn permission_and_the_count_of_bytes_begin_anew_on_a_connection_that_was_used_before() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let upstream = reusing(scripted.addr, PATIENCE);
    let answer = send(upstream.dial().await.unwrap()).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
    let dialed = dial_reused(&upstream, &scripted, 1).await;
    let held = dialed.send(post("hi"), || false).await;
    assert!(matches!(held, Err(SendError::Held)), "{:?}", held.err());
    assert_eq!(scripted.seen().len(), 1, "nothing was sent");
}

#[tokio::test]
async fn what_was_written_on_a_connection_that_was_used_before_is_never_taken_for_unsent() {
    // The upstream reads the second request of a connection, and closes without an answer.
    let scripted = Scripted::start(|n, _| match n {
        1 => Reply::keep(OK),
        _ => Reply::fin(""),
    })
    .await;
    let upstream = reusing(scripted.addr, PATIENCE);
    let answer = send(upstream.dial().await.unwrap()).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
    let lost = send(dial_reused(&upstream, &scripted, 1).await).await;
    assert!(matches!(lost, Err(SendError::Broken(_))), "{:?}", lost.err());
    assert_eq!(scripted.seen().len(), 2, "and it is not sent again");
}

/// An upstream that answers one request on each of two connections, and closes the first when it is told to.
struct Closing {
    addr: SocketAddr,
    close: std::sync::mpsc::Sender<()>,
    is_closed: std::sync::mpsc::Receiver<()>,
    server: std::thread::JoinHandle<()>,
}

impl Closing {
    fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (close, closing) = std::sync::mpsc::channel::<()>();
        let (closed, is_closed) = std::sync::mpsc::channel::<()>();
        let server = std::thread::spawn(move || {
            for round in 1..=2 {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 2000];
                assert!(std::io::Read::read(&mut stream, &mut request).unwrap() > 0);
                std::io::Write::write_all(&mut stream, OK.as_bytes()).unwrap();
                if round == 1 {
                    closing.recv().unwrap();
                    drop(stream);
                    closed.send(()).unwrap();
                }
            }
        });
        Self { addr, close, is_closed, server }
    }

    /// Closes the first connection. All tasks are on this thread: they park the connection now, and see nothing while it
    /// blocks.
    async fn close(&self) {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        self.close.send(()).unwrap();
        self.is_closed.recv().unwrap();
    }
}

#[tokio::test]
async fn a_connection_that_the_upstream_has_closed_carries_no_reserved_request() {
    // The FIN is there, but the connection's task has not seen it yet.
    let closing = Closing::start();
    let upstream = reusing(closing.addr, PATIENCE);
    let answer = send(upstream.dial().await.unwrap()).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
    closing.close().await;
    let answer = send(upstream.dial().await.unwrap()).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
    closing.server.join().unwrap();
}

#[tokio::test]
async fn a_request_that_met_a_dead_pooled_connection_unsent_goes_out_on_another() {
    // The FIN is there, but the connection's task has not seen it yet.
    let closing = Closing::start();
    let upstream = upstream(closing.addr);
    let request = || post("hi").map(|body| body.map_err(|never| match never {}).boxed_unsync());
    let first = upstream.pooled(request()).await.unwrap();
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes(), "ok");
    closing.close().await;
    let second = upstream.pooled(request()).await.unwrap();
    assert_eq!(second.into_body().collect().await.unwrap().to_bytes(), "ok");
    closing.server.join().unwrap();
}

#[tokio::test]
async fn letting_go_of_a_request_or_an_answer_closes_the_connection() {
    let slow = Reply::keep(OK).after(Duration::from_secs(3600));
    let scripted = Scripted::start(move |number, _| match number {
        1 => slow.clone(),
        _ => Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"),
    })
    .await;
    let (dialed, other) = pair().await;
    let waiting = tokio::spawn(send(dialed));
    other.readable().await.unwrap();
    waiting.abort();
    let mut buffer = Vec::new();
    let mut other = other;
    let read = tokio::io::AsyncReadExt::read_to_end(&mut other, &mut buffer);
    tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();

    let upstream = upstream(scripted.addr);
    let first = tokio::spawn(send(upstream.dial().await.unwrap()));
    scripted.wait_for_requests(1).await;
    first.abort();
    let answer = send(upstream.dial().await.unwrap()).await.unwrap();
    drop(answer);
    scripted.wait_for_closed(1).await;
}

#[tokio::test]
async fn a_cut_answer_is_an_error_of_its_body() {
    for bytes in [
        "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        "HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\nabc",
    ] {
        for reply in [Reply::fin(bytes), Reply::reset(bytes)] {
            let scripted = Scripted::always(reply).await;
            match send(upstream(scripted.addr).dial().await.unwrap()).await {
                Ok(answer) => assert!(whole(answer).await.is_err(), "{bytes:?}"),
                Err(error) => assert!(matches!(error, SendError::Broken(_))),
            }
        }
    }
}

#[tokio::test]
async fn an_answer_that_ends_nowhere_or_switches_protocols_is_broken() {
    for bytes in [
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
        "rubbish\r\n\r\n",
    ] {
        let scripted = Scripted::always(Reply::fin(bytes)).await;
        let result = send(upstream(scripted.addr).dial().await.unwrap()).await;
        assert!(matches!(result, Err(SendError::Broken(_))), "{bytes:?}");
    }
}

#[tokio::test]
async fn interim_answers_are_skipped() {
    let interim = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n";
    let scripted = Scripted::always(Reply::keep(format!("{interim}{OK}"))).await;
    let answer = send(upstream(scripted.addr).dial().await.unwrap()).await.unwrap();
    assert_eq!(whole(answer).await.unwrap(), "200 ok");
}

#[tokio::test]
async fn an_answer_with_a_big_or_odd_head_is_still_an_answer() {
    let many: String = (0..150).map(|n| format!("X-{n}: {n}\r\n")).collect();
    let big = format!("X-Big: {}\r\n", "b".repeat(70_000));
    for (lines, name, value) in [
        (many.as_str(), "x-149", Some("149")),
        (big.as_str(), "x-big", None),
        ("X-Fold: a\r\n  b\r\n", "x-fold", Some("a b")),
        ("X-A : b\r\n", "x-a", Some("b")),
        ("X(A): b\r\nX-B: c\r\n", "x-b", Some("c")),
    ] {
        let bytes = format!("HTTP/1.1 201 Created\r\n{lines}Content-Length: 2\r\n\r\nok");
        let scripted = Scripted::always(Reply::keep(bytes)).await;
        let answer = send(upstream(scripted.addr).dial().await.unwrap()).await.unwrap();
        let found = answer.headers()[name].to_str().unwrap().to_owned();
        match value {
            Some(value) => {
                let joined = found.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
                assert_eq!(joined, value);
            }
            None => assert_eq!(found.len(), 70_000),
        }
        assert_eq!(whole(answer).await.unwrap(), "201 ok", "{name}");
    }
}

#[tokio::test]
async fn an_answer_without_a_reason_or_with_an_odd_status_is_still_an_answer() {
    for (line, status) in [("200", 200), ("200 ", 200), ("299 X\u{e9}", 299), ("999 No", 999)] {
        let bytes = format!("HTTP/1.1 {line}\r\nContent-Length: 2\r\n\r\nok");
        let scripted = Scripted::always(Reply::keep(bytes)).await;
        let answer = send(upstream(scripted.addr).dial().await.unwrap()).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{line}");
    }
}

#[tokio::test]
async fn a_request_goes_out_with_one_computed_length() {
    let scripted = Scripted::always(Reply::keep(OK)).await;
    let upstream = upstream(scripted.addr);
    let ask = |method: Method, body: &'static str| {
        Request::builder()
            .method(method)
            .uri("/x?y=%2F")
            .header("content-length", "77")
            .header("transfer-encoding", "chunked")
            .header("expect", "100-continue")
            .body(Full::from(body))
            .unwrap()
    };
    for (request, length) in [
        (ask(Method::POST, "hi"), "2"),
        (ask(Method::POST, ""), "0"),
        (ask(Method::DELETE, "hi"), "2"),
        (ask(Method::GET, "hi"), "2"),
    ] {
        let dialed = upstream.dial().await.unwrap();
        let answer = dialed.send(request, || true).await.unwrap();
        assert_eq!(whole(answer).await.unwrap(), "200 ok");
        let seen = scripted.seen().pop().unwrap();
        assert_eq!(headers(&seen.head, "content-length"), [length]);
        assert_eq!(headers(&seen.head, "transfer-encoding").len(), 0);
        assert_eq!(headers(&seen.head, "expect").len(), 0);
        assert_eq!(headers(&seen.head, "host").len(), 1, "{}", seen.head);
        assert_eq!(seen.target(), "/x?y=%2F");
    }
}

#[test]
fn an_upstream_is_an_origin() {
    for wrong in ["http://a/b", "http://u:p@a", "ftp://a", "/x", "http://a/?q"] {
        assert!(Upstream::new(Settings::at(wrong.parse().unwrap())).is_err(), "{wrong}");
    }
    for right in ["http://a", "http://[::1]:80/", "http://a:3000"] {
        assert!(Upstream::new(Settings::at(right.parse().unwrap())).is_ok(), "{right}");
    }
}

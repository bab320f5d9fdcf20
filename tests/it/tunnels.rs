//! What passes through after a switch of protocols: websockets of the public library, and bytes of any other protocol.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::support::client::get;
use crate::support::process::{self, Gateway, PATIENCE, eventually};
use crate::support::python::{Running, script};
use crate::support::raw::{End, Raw, body, find, header, headers, latin, status};
use crate::support::rig::{self, Place, Which};
use crate::support::upstream::{OK, Reply, Upstream};

const ASK: &str =
    "GET /feed HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: Feed/2\r\n\r\n";
const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: feed/2\r\nX-Feed: 7\r\n\r\n";

/// A gateway with these lines in `[server]` and `[upstream]`.
async fn gateway(api: &str, server: &str, upstream: &str) -> (Place, Gateway) {
    let place = Place::new(Which::Sqlite).await;
    let toml =
        rig::config_at(&place, api, &format!("127.0.0.1:{}", process::free_port()), "", "", "")
            .replace("[server]\n", &format!("[server]\n{server}\n"))
            .replace("[upstream]\n", &format!("[upstream]\n{upstream}\n"));
    let config = process::config(place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    (place, gateway)
}

/// An API that speaks its own protocol after the switch.
struct Api(TcpListener);

impl Api {
    async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn url(&self) -> String {
        format!("http://{}", self.0.local_addr().unwrap())
    }

    /// The next request's head, and its connection, on which `early` came behind the head.
    async fn asked(&self, early: &str) -> (String, TcpStream) {
        let (mut stream, _) = timeout(PATIENCE, self.0.accept()).await.unwrap().unwrap();
        let mut bytes = Vec::new();
        loop {
            if let Some(head) = find(&bytes, b"\r\n\r\n").map(|at| at + 4)
                && bytes.len() >= head + early.len()
            {
                assert_eq!(latin(&bytes[head..]), early);
                return (latin(&bytes[..head]), stream);
            }
            assert_ne!(timeout(PATIENCE, stream.read_buf(&mut bytes)).await.unwrap().unwrap(), 0);
        }
    }

    /// A tunnel: the caller's end, and the API's.
    async fn tunnel(&self, gateway: &Gateway) -> (Raw, TcpStream) {
        let mut caller = Raw::sending(gateway.addr, ASK).await;
        let (_, mut stream) = self.asked("").await;
        stream.write_all(SWITCH.as_bytes()).await.unwrap();
        assert_eq!(status(&caller.answer().await), 101);
        (caller, stream)
    }
}

async fn reads(stream: &mut TcpStream, wanted: &str) {
    let mut bytes = vec![0; wanted.len()];
    timeout(PATIENCE, stream.read_exact(&mut bytes)).await.unwrap().unwrap();
    assert_eq!(latin(&bytes), wanted);
}

/// Nothing more comes; whether by an end or by a reset.
async fn ends(stream: &mut TcpStream) {
    let read = timeout(PATIENCE, stream.read(&mut [0])).await.expect("an end in time");
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
}

async fn metric(gateway: &Gateway, name: &str) -> u64 {
    let answer = get("/metrics").to(gateway.admin).await;
    let text = latin(&answer.body);
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.trim().parse().unwrap())
}

async fn ended(gateway: &Gateway, how: &str, count: u64) {
    let name = format!("oncegate_tunnels_total{{end=\"{how}\"}}");
    eventually(&format!("{count} tunnels have ended: {how}"), async || {
        metric(gateway, &name).await == count && metric(gateway, "oncegate_tunnels_open").await == 0
    })
    .await;
}

fn websockets() -> (Running, String) {
    let mut serve = script("websocket.py");
    serve.arg("serve");
    let server = Running::start(serve);
    let url = format!("http://127.0.0.1:{}", server.line());
    (server, url)
}

fn staying(gateway: &Gateway, pause: &str) -> Running {
    let mut stay = script("websocket.py");
    stay.args(["stay", &format!("ws://{}/room", gateway.addr), pause]);
    Running::start(stay)
}

#[tokio::test(flavor = "multi_thread")]
async fn websockets_pass_through_both_ways() {
    let (_server, api) = websockets();
    let (_place, gateway) = gateway(&api, "", "").await;
    let url = format!("ws://{}", gateway.addr);
    let talk = || script("websocket.py").args(["talk", &url]).output().unwrap();
    let output = tokio::task::block_in_place(talk);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ended(&gateway, "closed", 20).await;
    for way in ["to_api", "to_caller"] {
        let bytes =
            metric(&gateway, &format!("oncegate_tunnel_bytes_total{{way=\"{way}\"}}")).await;
        assert!(bytes > 20 * 1_500_000, "{way}: {bytes}");
    }
    eventually("each is told", async || gateway.log().matches("a tunnel has ended").count() == 20)
        .await;
    let log = gateway.log();
    assert_eq!(log.matches("a tunnel is open").count(), 20);
    assert!(log.contains("/room") && !log.contains("secret"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_outlives_a_restart_of_the_gateway_by_connecting_anew() {
    let (_server, api) = websockets();
    let (_place, mut gateway) = gateway(&api, "", "").await;
    let client = staying(&gateway, "0");
    assert_eq!(client.line(), "open");
    // A drain: long before the grace of 10 s is over, since nothing passes.
    let begun = Instant::now();
    gateway.terminate();
    assert!(tokio::task::block_in_place(|| gateway.exited()).success());
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    assert_eq!(client.line(), "closed");
    let log = gateway.log();
    assert!(log.contains("a tunnel has ended") && log.contains("shutdown"), "{log}");
    assert!(!log.contains("cut at the end of the grace"), "{log}");
    gateway = tokio::task::block_in_place(|| gateway.restart());
    assert_eq!(client.line(), "open");
    // And a crash.
    gateway.kill9();
    assert_eq!(client.line(), "closed");
    let _gateway = tokio::task::block_in_place(|| gateway.restart());
    assert_eq!(client.line(), "open");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_websocket_is_cut_at_the_end_of_the_grace() {
    let (_server, api) = websockets();
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config(&place, &api, "").replace("\"10s\"", "\"2s\"");
    let config = process::config(place.folder.path(), &toml);
    let mut gateway = tokio::task::block_in_place(|| Gateway::start(&config));
    let client = staying(&gateway, "0.05");
    assert_eq!(client.line(), "open");
    let begun = Instant::now();
    gateway.terminate();
    assert!(tokio::task::block_in_place(|| gateway.exited()).success());
    assert!(begun.elapsed() >= Duration::from_secs(2), "it had its grace: {:?}", begun.elapsed());
    assert_eq!(client.line(), "closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_behind_the_heads_arrive_and_each_side_may_end_first() {
    let api = Api::start().await;
    let (_place, gateway) = gateway(&api.url(), "", "").await;
    for caller_ends_first in [true, false] {
        let mut caller = Raw::sending(gateway.addr, format!("{ASK}early frames")).await;
        let (head, mut stream) = api.asked("").await;
        assert_eq!(headers(&head, "upgrade"), ["Feed/2"]);
        assert_eq!(headers(&head, "connection"), ["Upgrade"]);
        assert_eq!(headers(&head, "via"), ["1.1 oncegate"]);
        stream.write_all(format!("{SWITCH}greeting").as_bytes()).await.unwrap();
        let answer = caller.answer().await;
        assert_eq!(status(&answer), 101);
        assert_eq!(header(&answer, "upgrade").as_deref(), Some("feed/2"));
        assert_eq!(header(&answer, "connection").as_deref(), Some("Upgrade"));
        assert_eq!(header(&answer, "x-feed").as_deref(), Some("7"));
        assert_eq!(header(&answer, "content-length"), None);
        reads(&mut stream, "early frames").await;
        caller.send("late frames").await;
        reads(&mut stream, "late frames").await;
        assert_eq!(metric(&gateway, "oncegate_tunnels_open").await, 1);
        if caller_ends_first {
            caller.half_close().await;
            ends(&mut stream).await;
            stream.write_all(b", and more").await.unwrap();
            drop(stream);
            assert_eq!(caller.rest().await, ("greeting, and more".into(), End::Fin));
        } else {
            stream.shutdown().await.unwrap();
            assert_eq!(caller.rest().await, ("greeting".into(), End::Fin));
            caller.send("and more").await;
            reads(&mut stream, "and more").await;
            drop(caller);
            ends(&mut stream).await;
        }
    }
    ended(&gateway, "closed", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_caller_sends_behind_the_end_of_the_api_arrives_whole() {
    let api = Api::start().await;
    let (_place, gateway) = gateway(&api.url(), "", "").await;
    let (mut caller, mut stream) = api.tunnel(&gateway).await;
    caller.send("one").await;
    reads(&mut stream, "one").await;
    stream.shutdown().await.unwrap();
    assert_eq!(caller.rest().await, (String::new(), End::Fin));
    // More than all buffers between the two hold.
    let bytes = vec![b'x'; 32_000_000];
    let length = bytes.len();
    let sending = tokio::spawn(async move {
        caller.stream.write_all(&bytes).await.unwrap();
        caller.half_close().await;
    });
    // This is what is tested: the API takes nothing for a while, and nobody may make room meanwhile.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut all = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut all)).await.unwrap().unwrap();
    assert_eq!(all.len(), length);
    sending.await.unwrap();
    ended(&gateway, "closed", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_one_connection_by_force_ends_the_other_at_once() {
    let api = Api::start().await;
    let (_place, gateway) = gateway(&api.url(), "", "").await;
    let (mut caller, stream) = api.tunnel(&gateway).await;
    stream.set_zero_linger().unwrap();
    drop(stream);
    assert_ne!(caller.rest().await.1, End::StillOpen);
    let (caller, mut stream) = api.tunnel(&gateway).await;
    caller.stream.set_zero_linger().unwrap();
    drop(caller);
    ends(&mut stream).await;
    // An API that has ended its sending, and then takes nothing more: only a failed write tells.
    let (mut caller, mut stream) = api.tunnel(&gateway).await;
    stream.shutdown().await.unwrap();
    assert_eq!(caller.rest().await, (String::new(), End::Fin));
    drop(stream);
    let closed = async {
        while caller.stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the caller is told");
    ended(&gateway, "failed", 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tunnel_in_which_nothing_passes_is_closed() {
    let api = Api::start().await;
    let idle = "tunnel_idle_timeout = \"2s\"";
    let (_place, gateway) = gateway(&api.url(), "", idle).await;
    let (mut caller, mut stream) = api.tunnel(&gateway).await;
    // What is tested: whatever passes, either way, keeps it open for longer than the time-out.
    for round in 0..6 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if round % 2 == 0 {
            caller.send("tick").await;
            reads(&mut stream, "tick").await;
        } else {
            stream.write_all(b"tock").await.unwrap();
            reads(&mut caller.stream, "tock").await;
        }
    }
    assert_eq!(caller.rest().await, (String::new(), End::Fin));
    ends(&mut stream).await;
    ended(&gateway, "idle", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tunnels_have_places_of_their_own() {
    let api = Api::start().await;
    let (_place, gateway) = gateway(&api.url(), "tunnels_max = 1", "").await;
    let (mut first, stream) = api.tunnel(&gateway).await;
    let answer = Raw::sending(gateway.addr, ASK).await.answer().await;
    assert_eq!(status(&answer), 503);
    assert!(body(&answer).contains("urn:oncegate:problem:overloaded"), "{answer}");
    assert!(header(&answer, "retry-after").is_some());
    drop(stream);
    first.half_close().await;
    assert_eq!(first.rest().await.1, End::Fin);
    ended(&gateway, "closed", 1).await;
    let (_caller, _stream) = api.tunnel(&gateway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_was_asked_for_becomes_a_tunnel() {
    let upstream = Upstream::start(|_, seen| match seen.target() {
        "/refused" => Reply::keep(
            "HTTP/1.1 426 Upgrade Required\r\nUpgrade: feed/3\r\nContent-Length: 2\r\n\r\nno",
        ),
        "/other" => Reply::keep(SWITCH.replace("feed/2", "h2c")),
        "/unsaid" => Reply::keep(SWITCH.replace("Upgrade: feed/2\r\n", "")),
        "/switch" => Reply::keep(SWITCH),
        _ => Reply::keep(OK),
    })
    .await;
    let (_place, gateway) = gateway(&format!("http://{}", upstream.addr), "", "").await;
    let ask =
        |target: &str, lines: &str| format!("GET {target} HTTP/1.1\r\nHost: a\r\n{lines}\r\n");
    let upgrade = "Connection: Upgrade\r\nUpgrade: Feed/2\r\n";
    // Refused by the API: an answer as any other, and the connection goes on.
    let mut raw = Raw::sending(gateway.addr, ask("/refused", upgrade)).await;
    let answer = raw.answer().await;
    assert_eq!((status(&answer), body(&answer)), (426, "no"));
    raw.send(ask("/next", "")).await;
    assert_eq!(status(&raw.answer().await), 200);
    for target in ["/other", "/unsaid"] {
        let answer = Raw::sending(gateway.addr, ask(target, upgrade)).await.answer().await;
        assert_eq!(status(&answer), 502, "{target}");
        assert!(body(&answer).contains("urn:oncegate:problem:upstream-failed"), "{answer}");
    }
    // Not asked for, or not lawfully: the API sees an ordinary request, and may not switch.
    for lines in [
        "",
        "Upgrade: feed/2\r\n",
        "Connection: Upgrade\r\n",
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        "Connection: Upgrade\r\nUpgrade: HTTP/2.0, TLS/1.2\r\n",
        "Connection: Upgrade\r\nUpgrade: feed/2;x\r\n",
        "Connection: Upgrade\r\nUpgrade: feed/2\r\nContent-Length: 2\r\n\r\nhi",
    ] {
        let answer = Raw::sending(gateway.addr, ask("/switch", lines)).await.answer().await;
        assert_eq!(status(&answer), 502, "{lines}");
        let answer = Raw::sending(gateway.addr, ask("/plain", lines)).await.answer().await;
        assert_eq!(status(&answer), 200, "{lines}");
        let head = upstream.seen().pop().unwrap().head;
        for name in ["upgrade", "connection", "http2-settings"] {
            assert_eq!(headers(&head, name).len(), 0, "{lines}: {head}");
        }
    }
    let seen = upstream.seen().len();
    let connect =
        "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: feed/2\r\n\r\n";
    assert_eq!(status(&Raw::sending(gateway.addr, connect).await.answer().await), 501);
    assert_eq!(upstream.seen().len(), seen);
    assert_eq!(metric(&gateway, "oncegate_tunnels_open").await, 0);
    assert!(!gateway.log().contains("a tunnel"), "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_keyed_route_an_upgrade_is_refused_and_nothing_reserved() {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let (place, gateway) = gateway(&format!("http://{}", upstream.addr), "", "").await;
    let order = |lines: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: acme\r\nIdempotency-Key: k\r\n\
             Content-Length: 2\r\n{lines}\r\n{{}}"
        )
    };
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    let mut raw = Raw::sending(gateway.addr, order(upgrade)).await;
    let answer = raw.answer().await;
    assert_eq!(status(&answer), 400);
    assert!(body(&answer).contains("urn:oncegate:problem:upgrade-refused"), "{answer}");
    assert_eq!((place.records().await, upstream.seen().len()), (0, 0));
    // The key is free. What carries HTTP, which some clients ask for each time, is as if it had not been asked for.
    let h2c = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n";
    let answer = Raw::sending(gateway.addr, order(h2c)).await.answer().await;
    assert_eq!(status(&answer), 200, "{answer}");
    assert_eq!(headers(&upstream.seen()[0].head, "upgrade").len(), 0);
    assert_eq!((place.records().await, upstream.seen().len()), (1, 1));
}

//! All that an upstream can do with a request, in one table: what the caller gets, what the record says, how often it was
//! sent, and what a retry gets. Each row has a route and an upstream of its own behind one gateway.

use http::StatusCode;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpSocket};

use crate::support::client::{Ask, post};
use crate::support::process::{self, Gateway};
use crate::support::rig::{Place, Which, config_at, on_both_stores};
use crate::support::upstream::{Reply, Upstream};

on_both_stores! {
    each_outcome_has_its_answer_its_record_and_its_retry,
}

/// What the upstream does with the first request. Whatever comes later it answers by 201, where it can.
enum Does {
    /// Nobody listens; later somebody does.
    Refuses,
    /// Its name has no address.
    HasNoName,
    /// It takes connections, and answers a TLS handshake by something else.
    SpeaksNoTls,
    /// It takes connections, and never answers a TLS handshake.
    ShakesNoHands,
    /// It resets the connection as soon as something has arrived, unread.
    ResetsUnread,
    /// It resets the connection once so many bytes have come.
    ResetsAfter(usize),
    /// It reads the request and answers so.
    Answers(Reply),
    /// It reads the head alone and answers so.
    AnswersEarly(Reply),
}

/// What the caller of the first request gets.
#[derive(Clone, Copy)]
enum Gets {
    /// A problem of the gateway.
    Problem(u16, &'static str),
    /// The upstream's own answer.
    Answer(u16),
    /// The upstream's own answer, up to where it breaks off.
    Part,
}

/// What the same request gets when it comes again.
#[derive(Clone, Copy)]
enum Retry {
    /// It is executed.
    Runs,
    /// It is refused: nobody knows.
    Held,
    /// The first answer.
    Replayed,
    /// It is refused: executed, the answer is not kept.
    NotRetained,
    /// It is tried again, in vain.
    Unreachable,
}

/// The body of the first request, and of its retry.
#[derive(Clone, Copy)]
enum Sends {
    Small,
    /// More than any socket holds: while it is being sent, most of it is still here.
    Large,
}

struct Row {
    name: &'static str,
    does: Does,
    sends: Sends,
    /// Lines of its route.
    policy: &'static str,
    /// Lines of its upstream.
    upstream: &'static str,
    gets: Gets,
    record: Option<&'static str>,
    retry: Retry,
}

const CREATED: &str = "HTTP/1.1 201 Created\r\n";
const WHOLE: &str = "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok";
const SHORT: &str = "timeout = \"400ms\"";
const SMALL: &str = "max_response_body = 100";
const MIB: usize = 1 << 20;
/// Bytes of [`Sends::Large`].
const LARGE: usize = 12 * MIB;
const TAKES_LARGE: &str = "max_request_body = \"16MiB\"";

const UNREACHABLE: Gets = Gets::Problem(502, "upstream-unreachable");
const FAILED: Gets = Gets::Problem(502, "upstream-failed");
const TIMED_OUT: Gets = Gets::Problem(504, "upstream-timeout");

/// Certainly not one byte was sent: released.
fn never_sent() -> Vec<Row> {
    let row = |name, does, retry| {
        let (upstream, gets) = ("connect_timeout = \"400ms\"", UNREACHABLE);
        Row { name, does, sends: Sends::Small, policy: "", upstream, gets, record: None, retry }
    };
    vec![
        row("the connection is refused", Does::Refuses, Retry::Runs),
        row("the name has no address", Does::HasNoName, Retry::Unreachable),
        row("no TLS", Does::SpeaksNoTls, Retry::Unreachable),
        row("no connection in time", Does::ShakesNoHands, Retry::Unreachable),
    ]
}

/// Bytes were sent and no complete answer came: unknown.
fn lost() -> Vec<Row> {
    let after = |name, bytes: &str| (name, Does::Answers(Reply::fin(bytes)));
    let short = format!("{CREATED}Content-Length: 10\r\n\r\nabc");
    let chunked = format!("{CREATED}Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
    let endless = Reply::keep(format!("{CREATED}\r\nhalf")).then_reset();
    let huge = format!("{CREATED}X-Huge: {}\r\nContent-Length: 0\r\n\r\n", "h".repeat(4 << 20));
    let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
    let broken = vec![
        ("a reset before a byte was read", Does::ResetsUnread),
        ("closed after the head was read", Does::AnswersEarly(Reply::fin(""))),
        ("reset after the head was read", Does::AnswersEarly(Reply::reset(""))),
        after("closed after the request", ""),
        ("reset after the request", Does::Answers(Reply::reset(""))),
        after("cut within the status line", "HTTP/1.1 20"),
        after("cut after the status line", CREATED),
        after("cut within the head", "HTTP/1.1 201 Created\r\nContent-Le"),
        after("cut within the body", &short),
        ("reset within the body", Does::Answers(Reply::keep(&short).then_reset())),
        after("no last chunk", &chunked),
        after("half a last chunk", &format!("{chunked}0\r\n")),
        ("a reset instead of an end", Does::Answers(endless)),
        after("a malformed status", "HTTP/1.1 2x1 Created\r\nContent-Length: 0\r\n\r\n"),
        after("a malformed length", "HTTP/1.1 201 Created\r\nContent-Length: ten\r\n\r\n"),
        after("two lengths", "HTTP/1.1 201 A\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok"),
        after("an unknown coding", "HTTP/1.1 201 A\r\nTransfer-Encoding: gzip\r\n\r\nok"),
        after("a malformed chunk", "HTTP/1.1 201 A\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        after("another protocol", "220 mail ready\r\n"),
        after("a head beyond all limits", &huge),
        ("a switch of protocols unasked", Does::Answers(Reply::keep(switch))),
        after("an interim answer alone", "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    ];
    let part = format!("{CREATED}Content-Length: 10\r\n\r\nabc");
    let silent = [
        ("no answer in time", Reply::keep("")),
        ("no whole head in time", Reply::keep("HTTP/1.1 201 Created\r\nContent-Le")),
        ("no whole body in time", Reply::keep(part)),
    ];
    let row = |name, does, policy, gets| {
        let (record, retry) = (Some("unknown"), Retry::Held);
        Row { name, does, sends: Sends::Small, policy, upstream: "", gets, record, retry }
    };
    let broken = broken.into_iter().map(|(name, does)| row(name, does, "", FAILED));
    let silent =
        silent.into_iter().map(|(name, reply)| row(name, Does::Answers(reply), SHORT, TIMED_OUT));
    broken.chain(silent).collect()
}

/// A complete answer: its status says which class it is.
fn answered() -> Vec<Row> {
    let by = |code: u16, lines: &str| {
        Does::Answers(Reply::keep(format!(
            "HTTP/1.1 {code} Said\r\n{lines}Content-Length: 4\r\n\r\nsaid"
        )))
    };
    let row = |name, code, lines, policy, record, retry| {
        let (does, gets) = (by(code, lines), Gets::Answer(code));
        Row { name, does, sends: Sends::Small, policy, upstream: "", gets, record, retry }
    };
    let stored = |name, code| row(name, code, "", "", Some("completed"), Retry::Replayed);
    let freed = |name, code, lines| row(name, code, lines, "", None, Retry::Runs);
    let open = |name, code| row(name, code, "", "", Some("unknown"), Retry::Held);
    let again = "Retry-After: 1\r\n";
    vec![
        stored("200", 200),
        stored("201", 201),
        stored("303", 303),
        stored("400", 400),
        stored("404", 404),
        stored("409", 409),
        stored("422", 422),
        stored("500", 500),
        stored("501", 501),
        freed("401", 401, ""),
        freed("403", 403, ""),
        freed("407", 407, ""),
        freed("408", 408, ""),
        freed("421", 421, ""),
        freed("425", 425, ""),
        freed("429", 429, ""),
        freed("503 with Retry-After", 503, again),
        open("502", 502),
        open("503 without Retry-After", 503),
        open("504", 504),
        row("400 where 4xx frees", 400, "", "release_on = [\"4xx\"]", None, Retry::Runs),
        row("500 where 5xx is open", 500, "", OPEN_5XX, Some("unknown"), Retry::Held),
        row("503 where 5xx is open", 503, again, OPEN_5XX, Some("unknown"), Retry::Held),
        row("501 by itself where 5xx is open", 501, "", FREE_501, None, Retry::Runs),
        row(
            "429 where nothing frees",
            429,
            "",
            "release_on = []",
            Some("completed"),
            Retry::Replayed,
        ),
        row(
            "502 where unknown is retried",
            502,
            "",
            "on_unknown = \"retry\"",
            Some("unknown"),
            Retry::Runs,
        ),
    ]
}

const OPEN_5XX: &str = "unknown_on = [\"5xx\"]";
const FREE_501: &str = "unknown_on = [\"5xx\"]\nrelease_on = [501]";

/// A complete answer that comes in an odd way: stored all the same.
fn odd() -> Vec<Row> {
    let long = "x".repeat(200);
    let large = format!(
        "HTTP/1.1 201 Created\r\nContent-Length: 70\r\nX-Big: {}\r\n\r\n{}",
        "b".repeat(70 * 1024),
        "y".repeat(70)
    );
    let interim = format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n{WHOLE}");
    let chunks = format!("{CREATED}Transfer-Encoding: chunked\r\n\r\nc8\r\n{long}\r\n0\r\n\r\n");
    let stream = format!("{CREATED}Content-Type: text/event-stream\r\n\r\ndata: x\n\n");
    let row = |name, does, policy, gets, retry| Row {
        name,
        does,
        sends: Sends::Small,
        policy,
        upstream: "",
        gets,
        record: Some("completed"),
        retry,
    };
    let impatient = |row| Row { upstream: "answer_idle_timeout = \"50ms\"", ..row };
    let silent = Does::Answers(Reply::keep(&stream));
    // A tenth of a second between the two pieces.
    let rested = Reply::keep(&WHOLE[..WHOLE.len() - 1]).then("k");
    let whole = |name, does| row(name, does, "", Gets::Answer(201), Retry::Replayed);
    let large_body = |name, bytes: &str, gets| {
        row(name, Does::Answers(Reply::fin(bytes)), SMALL, gets, Retry::NotRetained)
    };
    vec![
        whole("an answer before the body was read", Does::AnswersEarly(Reply::keep(WHOLE))),
        whole("an interim answer, then the answer", Does::Answers(Reply::keep(interim))),
        whole(
            "a body that ends with the connection",
            Does::Answers(Reply::fin(format!("{CREATED}\r\nok"))),
        ),
        whole("an answer, then a reset", Does::Answers(Reply::keep(WHOLE).then_reset())),
        whole("an answer in two pieces", Does::Answers(Reply::keep(&WHOLE[..9]).then(&WHOLE[9..]))),
        whole("a huge head", Does::Answers(Reply::keep(large))),
        large_body(
            "a body beyond the limit, by its length",
            &format!("{CREATED}Content-Length: 200\r\n\r\n{long}"),
            Gets::Answer(201),
        ),
        large_body("a body beyond the limit, in chunks", &chunks, Gets::Answer(201)),
        impatient(whole("a pause within a body that is read whole", Does::Answers(rested))),
        impatient(row("a stream that falls silent", silent, SMALL, Gets::Part, Retry::NotRetained)),
        large_body("a stream of events", &stream, Gets::Answer(201)),
        large_body(
            "a body beyond the limit that breaks off",
            &format!("{CREATED}Content-Length: 300\r\n\r\n{long}"),
            Gets::Part,
        ),
    ]
}

/// Requests and answers that are cut while most of them is still on its way.
fn large() -> Vec<Row> {
    let row = |name, does, gets, record, retry| {
        let (sends, policy) = (Sends::Small, "");
        Row { name, does, sends, policy, upstream: "", gets, record: Some(record), retry }
    };
    let request = |row| Row { sends: Sends::Large, policy: TAKES_LARGE, ..row };
    let cut = |name, does| request(row(name, does, FAILED, "unknown", Retry::Held));
    // An answer of so many bytes, of which so many come.
    let sized = |whole: usize, come: usize| {
        format!("{CREATED}Content-Length: {whole}\r\n\r\n{}", "x".repeat(come))
    };
    let chunks = |come: usize| {
        let chunk = format!("{:x}\r\n{}\r\n", MIB / 4, "x".repeat(MIB / 4));
        format!("{CREATED}Transfer-Encoding: chunked\r\n\r\n{}", chunk.repeat(come / (MIB / 4)))
    };
    let fin = |bytes: String| Does::Answers(Reply::fin(bytes));
    let reset = |bytes: String| Does::Answers(Reply::keep(bytes).then_reset());
    let lost = |name, does| row(name, does, FAILED, "unknown", Retry::Held);
    // Beyond `max_response_body`: it is completed before its first byte goes on.
    let part = |name, does| row(name, does, Gets::Part, "completed", Retry::NotRetained);
    let early = Does::AnswersEarly(Reply::keep(WHOLE).then_reset());
    vec![
        cut("reset before a byte of a large body was read", Does::ResetsUnread),
        cut("reset at the head of a large body", Does::AnswersEarly(Reply::reset(""))),
        cut("closed at the head of a large body", Does::AnswersEarly(Reply::fin(""))),
        cut("reset in the middle of a large body", Does::ResetsAfter(2 * MIB)),
        cut("cut within an answer to a large body", Does::AnswersEarly(Reply::fin(CREATED))),
        request(row(
            "an answer, then a reset, in the middle of a large body",
            early,
            Gets::Answer(201),
            "completed",
            Retry::Replayed,
        )),
        lost("closed in the middle of an answer near the limit", fin(sized(MIB, MIB / 2))),
        lost("reset in the middle of an answer near the limit", reset(sized(MIB, MIB - 1))),
        lost("closed within the chunks of an answer, before the limit", fin(chunks(MIB / 2))),
        lost("reset within the chunks of an answer, at the limit", reset(chunks(MIB))),
        part("closed after the head of a large answer", fin(sized(8 * MIB, 0))),
        part("reset after the head of a large answer", reset(sized(8 * MIB, 0))),
        part("closed in the middle of a large answer", fin(sized(8 * MIB, 4 * MIB))),
        part("reset in the middle of a large answer", reset(sized(8 * MIB, 4 * MIB))),
        part("closed within the chunks of a large answer", fin(chunks(4 * MIB))),
    ]
}

/// An upstream as it stands before a row.
struct Behind {
    url: String,
    scripted: Option<Upstream>,
    /// Bound, and not listening yet.
    socket: Option<TcpSocket>,
}

impl Does {
    async fn start(self) -> Behind {
        let then = |first: Reply| {
            move |number: usize, _: &_| if number == 1 { first.clone() } else { Reply::keep(WHOLE) }
        };
        let behind = |url: String| Behind { url, scripted: None, socket: None };
        match self {
            Self::Refuses => {
                let socket = TcpSocket::new_v4().unwrap();
                socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
                let url = format!("http://{}", socket.local_addr().unwrap());
                Behind { url, scripted: None, socket: Some(socket) }
            }
            Self::HasNoName => behind("http://no-such-name.invalid:80".to_owned()),
            Self::SpeaksNoTls => {
                let scripted = Upstream::always(Reply::fin("")).await;
                let addr = greeting(b"220 mail ready\r\n").await;
                Behind { url: format!("https://{addr}"), scripted: Some(scripted), socket: None }
            }
            Self::ShakesNoHands => behind(format!("https://{}", greeting(b"").await)),
            Self::ResetsUnread => behind(resetting(0).await),
            Self::ResetsAfter(bytes) => behind(resetting(bytes).await),
            Self::Answers(reply) => {
                let scripted = Upstream::start(then(reply)).await;
                Behind {
                    url: format!("http://{}", scripted.addr),
                    scripted: Some(scripted),
                    socket: None,
                }
            }
            Self::AnswersEarly(reply) => {
                let scripted = Upstream::start_hasty(then(reply)).await;
                Behind {
                    url: format!("http://{}", scripted.addr),
                    scripted: Some(scripted),
                    socket: None,
                }
            }
        }
    }
}

/// Resets each connection on which something has arrived, once so many bytes of it have been read.
async fn resetting(after: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            drop(stream.peek(&mut [0]).await);
            drop(stream.read_exact(&mut vec![0; after]).await);
            stream.set_zero_linger().unwrap();
        }
    });
    format!("http://{addr}")
}

/// Says this on each connection, and keeps it.
async fn greeting(text: &'static [u8]) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            drop(tokio::io::AsyncWriteExt::write_all(&mut stream, text).await);
            open.push(stream);
        }
    });
    addr
}

/// A row with its route.
struct Case {
    row: Row,
    behind: Behind,
    number: usize,
}

impl Case {
    fn ask(&self) -> Ask {
        let ask = post(&format!("/{}", self.number), r#"{"amount":"129.90"}"#);
        let ask = match self.row.sends {
            Sends::Small => ask,
            Sends::Large => ask.set("content-type", "text/plain").body(vec![b'x'; LARGE]),
        };
        ask.tenant("acme").key("k")
    }

    fn sent(&self) -> usize {
        self.behind.scripted.as_ref().map_or(0, |upstream| upstream.seen().len())
    }

    async fn record(&self, place: &Place) -> Option<String> {
        let number = self.number;
        let sql = format!("select status from idempotency_records where operation = 'o{number}'");
        place.rows(&sql).await.into_iter().next()?.into_iter().next()?
    }

    async fn events(&self, place: &Place) -> i64 {
        let number = self.number;
        place
            .count(&format!("select count(*) from outbox_events where event_type = 'o{number}'"))
            .await
    }

    /// The first request.
    async fn first(&self, place: &Place, gateway: &Gateway) {
        let name = self.row.name;
        let answer = self.ask().send(gateway.addr).await;
        match (self.row.gets, answer) {
            (Gets::Part, answer) => assert!(answer.is_err(), "{name}: taken for whole"),
            (Gets::Answer(code), Ok(answer)) => {
                assert_eq!(answer.status.as_u16(), code, "{name}: {answer:?}");
                assert!(!answer.replayed(), "{name}");
                let json = answer.header("content-type") == Some("application/problem+json");
                assert!(!json, "{name}: the upstream's own answer is passed on: {answer:?}");
            }
            (Gets::Problem(code, problem), Ok(answer)) => {
                assert_eq!(
                    (answer.status.as_u16(), answer.problem().as_str()),
                    (code, problem),
                    "{name}"
                );
                assert_eq!(answer.json()["retry"], "same-key", "{name}");
            }
            (_, Err(error)) => panic!("{name}: {error}"),
        }
        assert_eq!(self.record(place).await.as_deref(), self.row.record, "{name}");
        let announced = match (self.row.record, self.row.gets) {
            (Some("completed"), Gets::Answer(200 | 201) | Gets::Part) => 1,
            _ => 0,
        };
        assert_eq!(self.events(place).await, announced, "{name}");
        if let Some(upstream) = &self.behind.scripted {
            let reached = !self.behind.url.starts_with("https");
            assert_eq!(upstream.connections(), usize::from(reached), "{name}: sent once");
        }
    }

    /// The same request again; the upstream answers by 201 now.
    async fn again(&mut self, place: &Place, gateway: &Gateway) {
        let name = self.row.name;
        if let Some(socket) = self.behind.socket.take() {
            let listener = socket.listen(16).unwrap();
            self.behind.scripted = Some(Upstream::listen(listener, |_, _| Reply::keep(WHOLE)));
        }
        let before = self.sent();
        let answer = self.ask().to(gateway.addr).await;
        let sent = self.sent() - before;
        let told = (answer.status.as_u16(), answer.replayed(), sent);
        match self.row.retry {
            Retry::Runs => {
                assert_eq!(told, (201, false, 1), "{name}: {answer:?}");
                assert!(self.ask().to(gateway.addr).await.replayed(), "{name}");
                assert_eq!(self.record(place).await.as_deref(), Some("completed"), "{name}");
            }
            Retry::Replayed => {
                let Gets::Answer(code) = self.row.gets else { panic!("{name}: nothing to replay") };
                assert_eq!(told, (code, true, 0), "{name}: {answer:?}");
            }
            Retry::Held => {
                assert_eq!(told, (409, false, 0), "{name}: {answer:?}");
                assert_eq!(answer.problem(), "outcome-unknown", "{name}");
            }
            Retry::NotRetained => {
                assert_eq!(told, (409, false, 0), "{name}: {answer:?}");
                assert_eq!(answer.problem(), "response-not-retained", "{name}");
            }
            Retry::Unreachable => {
                assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{name}: {answer:?}");
                assert_eq!(answer.problem(), "upstream-unreachable", "{name}");
                assert_eq!(self.record(place).await, None, "{name}: the key is free again");
            }
        }
    }
}

async fn each_outcome_has_its_answer_its_record_and_its_retry(which: Which) {
    let rows = [never_sent(), lost(), answered(), odd(), large()].into_iter().flatten();
    let (mut cases, mut more) = (Vec::new(), String::new());
    for (number, mut row) in rows.enumerate() {
        let does = std::mem::replace(&mut row.does, Does::HasNoName);
        let behind = does.start().await;
        let (url, policy, upstream) = (&behind.url, row.policy, row.upstream);
        more += &format!(
            "[upstreams.u{number}]\nurl = \"{url}\"\n{upstream}\n[[route]]\nmethod = \"POST\"\npath = \"/{number}\"\noperation = \"o{number}\"\nupstream = \"u{number}\"\n{policy}\n"
        );
        cases.push(Case { row, behind, number });
    }
    let place = Place::new(which).await;
    let toml = config_at(&place, "http://127.0.0.1:1", "127.0.0.1:0", "", "", &more);
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    for case in &mut cases {
        case.first(&place, &gateway).await;
        case.again(&place, &gateway).await;
    }
    let running = "select count(*) from idempotency_records where status = 'in_progress'";
    assert_eq!(place.count(running).await, 0, "each attempt has its end");
}

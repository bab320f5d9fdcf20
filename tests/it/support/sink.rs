//! A scriptable webhook sink on raw sockets: records each request as bytes and headers, checks the signature over the
//! raw body, and does to each what the script says: any bytes, a delay, a drip, an endless body, FIN or RST.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use standardwebhooks::Webhook;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

pub(crate) const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) verified: bool,
}

impl Seen {
    pub(crate) fn id(&self) -> String {
        self.headers["webhook-id"].to_str().unwrap().to_owned()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// What the sink does to one request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// A status with headers (`name: value` lines, each with CRLF) and a small body.
    Answer(u16, &'static str),
    /// These bytes, then the connection stays.
    Raw(&'static str),
    /// These bytes, then FIN.
    Fin(&'static str),
    /// These bytes, then RST.
    Rst(&'static str),
    /// These bytes, then this byte again and again with a pause.
    Drip(&'static str, u8, Duration),
    /// These bytes, then data without end, as fast as it is taken.
    Endless(&'static str),
    /// Never anything.
    Silence,
    /// First a pause.
    After(Duration, Box<Self>),
    /// Not before this is true.
    When(watch::Receiver<bool>, Box<Self>),
}

pub(crate) const OK: Act = Act::Answer(200, "");

type Script = dyn Fn(&Seen, usize) -> Act + Send + Sync;

#[derive(Default)]
struct Book {
    seen: Vec<Seen>,
    flying: BTreeMap<String, usize>,
    most: usize,
    most_per_id: usize,
    connections: usize,
}

pub(crate) struct Sink {
    pub(crate) port: u16,
    book: Arc<Mutex<Book>>,
    _task: JoinSet<()>,
}

impl Sink {
    /// A sink that does what `script` says of a request and of how many came before it.
    pub(crate) async fn start(
        script: impl Fn(&Seen, usize) -> Act + Send + Sync + 'static,
    ) -> Self {
        Self::on(0, script).await
    }

    /// As [`Sink::start`], on this port of the loopback.
    pub(crate) async fn on(
        port: u16,
        script: impl Fn(&Seen, usize) -> Act + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let book = Arc::new(Mutex::new(Book::default()));
        let script: Arc<Script> = Arc::new(script);
        let mut task = JoinSet::new();
        let shared = Arc::clone(&book);
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                shared.lock().unwrap().connections += 1;
                connections.spawn(serve(stream, Arc::clone(&shared), Arc::clone(&script)));
            }
        });
        Self { port, book, _task: task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook?x=1", self.port)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.book.lock().unwrap().seen.clone()
    }

    pub(crate) fn ids(&self) -> BTreeSet<String> {
        self.seen().iter().map(Seen::id).collect()
    }

    pub(crate) fn connections(&self) -> usize {
        self.book.lock().unwrap().connections
    }

    /// Most requests in flight at once: in all, and under one id.
    pub(crate) fn most(&self) -> (usize, usize) {
        let book = self.book.lock().unwrap();
        (book.most, book.most_per_id)
    }
}

async fn serve(mut stream: TcpStream, book: Arc<Mutex<Book>>, script: Arc<Script>) {
    let mut buffer = Vec::new();
    while let Some(seen) = read(&mut stream, &mut buffer).await {
        let id = seen.id();
        let act = {
            let mut book = book.lock().unwrap();
            let act = script(&seen, book.seen.len());
            book.seen.push(seen);
            *book.flying.entry(id.clone()).or_default() += 1;
            book.most_per_id = book.most_per_id.max(book.flying[&id]);
            book.most = book.most.max(book.flying.values().sum());
            act
        };
        let stays = play(&mut stream, act).await;
        if let Some(flying) = book.lock().unwrap().flying.get_mut(&id) {
            *flying -= 1;
        }
        if !stays {
            return;
        }
    }
}

async fn read(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Seen> {
    loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
            let mut lines = head.split("\r\n");
            let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
            let mut headers = HeaderMap::new();
            for line in lines {
                let (name, value) = line.split_once(": ").unwrap();
                let name: HeaderName = name.parse().unwrap();
                headers.append(name, HeaderValue::from_str(value).unwrap());
            }
            let length: usize = headers["content-length"].to_str().unwrap().parse().unwrap();
            if buffer.len() >= end + 4 + length {
                let rest = buffer.split_off(end + 4 + length);
                let body = buffer.split_off(end + 4);
                *buffer = rest;
                let verified = Webhook::new(SECRET).unwrap().verify(&body, &headers).is_ok();
                return Some(Seen { at: Instant::now(), path, headers, body, verified });
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// Whether the connection stays.
async fn play(stream: &mut TcpStream, act: Act) -> bool {
    match act {
        Act::Answer(status, headers) => {
            let bodyless = matches!(status, 204 | 304);
            let body = if bodyless { "" } else { "content-length: 4\r\n\r\nwhy?" };
            let end = if bodyless { "\r\n" } else { "" };
            let text = format!("HTTP/1.1 {status} Said\r\n{headers}{body}{end}");
            stream.write_all(text.as_bytes()).await.is_ok()
        }
        Act::Raw(bytes) => stream.write_all(bytes.as_bytes()).await.is_ok(),
        Act::Fin(bytes) => {
            drop(stream.write_all(bytes.as_bytes()).await);
            drop(stream.shutdown().await);
            false
        }
        Act::Rst(bytes) => {
            drop(stream.write_all(bytes.as_bytes()).await);
            // What was written must arrive before the reset throws it away.
            tokio::time::sleep(Duration::from_millis(30)).await;
            drop(stream.set_zero_linger());
            false
        }
        Act::Drip(bytes, byte, pause) => {
            drop(stream.write_all(bytes.as_bytes()).await);
            while stream.write_all(&[byte]).await.is_ok() {
                tokio::time::sleep(pause).await;
            }
            false
        }
        Act::Endless(bytes) => {
            drop(stream.write_all(bytes.as_bytes()).await);
            while stream.write_all(&[b'x'; 16 * 1024]).await.is_ok() {}
            false
        }
        Act::Silence => {
            let mut nothing = Vec::new();
            drop(stream.read_to_end(&mut nothing).await);
            false
        }
        Act::After(pause, act) => {
            tokio::time::sleep(pause).await;
            Box::pin(play(stream, *act)).await
        }
        Act::When(mut gate, act) => {
            drop(gate.wait_for(|open| *open).await);
            Box::pin(play(stream, *act)).await
        }
    }
}

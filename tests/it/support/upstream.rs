//! A scripted upstream on a raw socket: it counts the requests that it has read whole, keeps their exact bytes, answers what
//! it is told, and ends the connection as it is told.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::raw::{PATIENCE, find, latin};

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A request that the upstream has read.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Counted from 1.
    pub(crate) connection: usize,
    /// The exact head, without the empty line.
    pub(crate) head: String,
    /// The exact bytes of the body: chunks as they came.
    pub(crate) body: Vec<u8>,
}

impl Seen {
    /// The target as it stood in the request line.
    pub(crate) fn target(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }
}

/// What follows the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Keep,
    Fin,
    Reset,
}

#[derive(Clone, Debug)]
pub(crate) struct Reply {
    delay: Duration,
    bytes: Vec<u8>,
    later: Vec<u8>,
    /// Between the bytes and what follows them.
    pause: Duration,
    after: After,
}

impl Reply {
    pub(crate) fn keep(bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref().to_vec();
        Self {
            delay: Duration::ZERO,
            bytes,
            later: Vec::new(),
            pause: Duration::ZERO,
            after: After::Keep,
        }
    }

    pub(crate) fn fin(bytes: impl AsRef<[u8]>) -> Self {
        Self { after: After::Fin, ..Self::keep(bytes) }
    }

    pub(crate) fn reset(bytes: impl AsRef<[u8]>) -> Self {
        Self { after: After::Reset, ..Self::keep(bytes) }
    }

    /// A reset a tenth of a second behind the answer: what was written has arrived by then.
    pub(crate) fn then_reset(self) -> Self {
        Self { pause: Duration::from_millis(100), after: After::Reset, ..self }
    }

    pub(crate) fn after(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// More bytes, a tenth of a second behind the answer.
    pub(crate) fn then(self, later: impl AsRef<[u8]>) -> Self {
        Self { later: later.as_ref().to_vec(), ..self }
    }
}

#[derive(Default)]
struct State {
    seen: Vec<Seen>,
    /// Connections that were accepted.
    connections: usize,
    /// Connections whose other side has closed.
    closed: usize,
    /// Requests of which only a part came.
    cut: usize,
}

/// The upstream; it ends with the test's runtime.
#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) addr: SocketAddr,
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

type Script = Arc<dyn Fn(usize, &Seen) -> Reply + Send + Sync>;

impl Upstream {
    /// Answers each request, numbered from 1, by what the script says of it.
    pub(crate) async fn start(
        script: impl Fn(usize, &Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::run(Arc::new(script), false).await
    }

    /// The same answer to every request.
    pub(crate) async fn always(reply: Reply) -> Self {
        Self::start(move |_, _| reply.clone()).await
    }

    /// Answers as soon as it has read a head, and does not read the body.
    pub(crate) async fn hasty(reply: Reply) -> Self {
        Self::run(Arc::new(move |_, _| reply.clone()), true).await
    }

    /// As [`Upstream::start`], on a socket that is there already.
    pub(crate) fn listen(
        listener: TcpListener,
        script: impl Fn(usize, &Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::serve_all(listener, Arc::new(script), false)
    }

    /// As [`Upstream::hasty`], by a script.
    pub(crate) async fn start_hasty(
        script: impl Fn(usize, &Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::run(Arc::new(script), true).await
    }

    async fn run(script: Script, hasty: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        Self::serve_all(listener, script, hasty)
    }

    fn serve_all(listener: TcpListener, script: Script, hasty: bool) -> Self {
        let addr = listener.local_addr().expect("address");
        let upstream = Self { addr, state: Arc::default(), changed: Arc::default() };
        let ours = upstream.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let connection = ours.change(|state| {
                    state.connections += 1;
                    state.connections
                });
                let (ours, script) = (ours.clone(), Arc::clone(&script));
                tokio::spawn(async move { ours.serve(stream, connection, script, hasty).await });
            }
        });
        upstream
    }

    async fn serve(&self, mut stream: TcpStream, connection: usize, script: Script, hasty: bool) {
        let mut buffer = Vec::new();
        while let Some(seen) = read_request(&mut stream, &mut buffer, connection, hasty).await {
            let number = self.change(|state| {
                state.seen.push(seen.clone());
                state.seen.len()
            });
            let reply = script(number, &seen);
            tokio::time::sleep(reply.delay).await;
            drop(stream.write_all(&reply.bytes).await);
            if !reply.later.is_empty() {
                tokio::time::sleep(Duration::from_millis(100)).await;
                drop(stream.write_all(&reply.later).await);
            }
            // Even a sleep of no time at all would take a moment.
            if !reply.pause.is_zero() {
                tokio::time::sleep(reply.pause).await;
            }
            if reply.after == After::Reset {
                drop(stream.set_zero_linger());
            }
            if reply.after != After::Keep {
                return;
            }
        }
        self.change(|state| {
            state.closed += 1;
            state.cut += usize::from(!buffer.is_empty());
        });
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock().expect("state"));
        self.changed.notify_waiters();
        result
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.lock().expect("state").seen.clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.lock().expect("state").connections
    }

    pub(crate) fn cut(&self) -> usize {
        self.state.lock().expect("state").cut
    }

    /// Waits until that many requests have been read.
    pub(crate) async fn wait_for_requests(&self, count: usize) {
        self.wait(|state| state.seen.len() >= count).await;
    }

    /// Waits until that many connections were closed by the other side.
    pub(crate) async fn wait_for_closed(&self, count: usize) {
        self.wait(|state| state.closed >= count).await;
    }

    async fn wait(&self, done: impl Fn(&State) -> bool) {
        let waited = timeout(PATIENCE, async {
            loop {
                let changed = self.changed.notified();
                if done(&self.state.lock().expect("state")) {
                    return;
                }
                changed.await;
            }
        });
        waited.await.expect("the upstream saw it in time");
    }
}

/// The next whole request; none at the end of the connection, with what was left in the buffer.
async fn read_request(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
    connection: usize,
    hasty: bool,
) -> Option<Seen> {
    loop {
        if let Some((head, body)) = whole_request(buffer, hasty) {
            let seen = Seen {
                connection,
                head: latin(&buffer[..head]),
                body: buffer[head + 4..head + 4 + body].to_vec(),
            };
            buffer.drain(..head + 4 + body);
            return Some(seen);
        }
        match stream.read_buf(buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
}

/// Lengths of head and body of the request at the start of the bytes, if it is there whole.
fn whole_request(bytes: &[u8], hasty: bool) -> Option<(usize, usize)> {
    let head = find(bytes, b"\r\n\r\n")?;
    let text = latin(&bytes[..head]);
    if hasty {
        return Some((head, 0));
    }
    if super::raw::header(&text, "transfer-encoding").is_some() {
        let body = &bytes[head + 4..];
        let last = if body.starts_with(b"0\r\n") { 0 } else { find(body, b"\r\n0\r\n")? + 2 };
        let end = last + find(&body[last..], b"\r\n\r\n")?;
        return Some((head, end + 4));
    }
    let length = super::raw::header(&text, "content-length");
    let length = length.map_or(0, |text| text.parse().expect("a length"));
    (bytes.len() >= head + 4 + length).then_some((head, length))
}

//! A client that sends exact bytes and tells how the connection ended.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything that should happen takes; a test that waits for it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Fin,
    Reset,
    StillOpen,
}

pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

impl Raw {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("connect");
        stream.set_nodelay(true).expect("nodelay");
        Self { stream, buffer: Vec::new() }
    }

    /// Connects and sends.
    pub(crate) async fn sending(addr: SocketAddr, bytes: impl AsRef<[u8]>) -> Self {
        let mut raw = Self::connect(addr).await;
        raw.send(bytes).await;
        raw
    }

    /// Sends; an error is no failure, because the other side may have closed on purpose.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        drop(self.stream.write_all(bytes.as_ref()).await);
    }

    pub(crate) async fn half_close(&mut self) {
        self.stream.shutdown().await.expect("shutdown");
    }

    /// All that comes until the connection ends.
    pub(crate) async fn rest(&mut self) -> (String, End) {
        self.rest_within(PATIENCE).await
    }

    /// Takes at least so many bytes more of what comes.
    pub(crate) async fn take(&mut self, bytes: usize) {
        let wanted = self.buffer.len() + bytes;
        let taking = async {
            while self.buffer.len() < wanted {
                let read = self.stream.read_buf(&mut self.buffer).await.expect("more bytes");
                assert!(read > 0, "the connection ended after {} bytes", self.buffer.len());
            }
        };
        timeout(PATIENCE, taking).await.expect("more bytes in time");
    }

    pub(crate) async fn rest_within(&mut self, limit: Duration) -> (String, End) {
        let end = timeout(limit, async {
            loop {
                match self.stream.read_buf(&mut self.buffer).await {
                    Ok(0) => return End::Fin,
                    Ok(_) => {}
                    Err(_) => return End::Reset,
                }
            }
        })
        .await
        .unwrap_or(End::StillOpen);
        (latin(&std::mem::take(&mut self.buffer)), end)
    }

    /// The next whole answer, framed by length or chunks; up to the end of the connection if it has neither.
    pub(crate) async fn answer(&mut self) -> String {
        self.answer_to(false).await
    }

    pub(crate) async fn answer_to_head(&mut self) -> String {
        self.answer_to(true).await
    }

    async fn answer_to(&mut self, is_head: bool) -> String {
        timeout(PATIENCE, self.read_answer(is_head)).await.expect("an answer in time")
    }

    async fn read_answer(&mut self, is_head: bool) -> String {
        loop {
            if let Some(length) = whole_answer(&self.buffer, is_head) {
                return latin(&self.buffer.drain(..length).collect::<Vec<_>>());
            }
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return latin(&std::mem::take(&mut self.buffer)),
                Ok(_) => {}
            }
        }
    }
}

/// The length of the answer at the start of the bytes, if it is there whole.
fn whole_answer(bytes: &[u8], is_head: bool) -> Option<usize> {
    let head = find(bytes, b"\r\n\r\n")? + 4;
    let text = latin(&bytes[..head]).to_ascii_lowercase();
    let bodiless = is_head || text.starts_with("http/1.1 204") || text.starts_with("http/1.1 304");
    if bodiless || text.starts_with("http/1.1 1") {
        return Some(head);
    }
    if text.contains("transfer-encoding: chunked") {
        let end = find(&bytes[head..], b"0\r\n\r\n")?;
        return Some(head + end + 5);
    }
    let length = header(&text, "content-length")?.parse::<usize>().ok()?;
    (bytes.len() >= head + length).then_some(head + length)
}

pub(crate) fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The first value of a header, whatever its spelling.
pub(crate) fn header(head: &str, name: &str) -> Option<String> {
    headers(head, name).into_iter().next()
}

/// All values of a header, in order.
pub(crate) fn headers(head: &str, name: &str) -> Vec<String> {
    let head = head.split("\r\n\r\n").next().unwrap_or_default();
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    let ours = lines.filter(|(n, _)| n.eq_ignore_ascii_case(name));
    ours.map(|(_, value)| value.trim().to_owned()).collect()
}

/// The status of an answer, 0 if there is none.
pub(crate) fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// What follows the head.
pub(crate) fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

pub(crate) fn latin(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

/// Values of `Transfer-Encoding` that are not exactly one `chunked`, whatever another reader takes them for.
pub(crate) const NOT_CHUNKED: [&str; 11] = [
    ",chunked",
    "chunked,",
    "\x0bchunked",
    "xchunked",
    "\"chunked\"",
    "chunked;q=1",
    "chunked, chunked",
    "gzip, chunked",
    "identity",
    "chunked\r\nTransfer-Encoding: chunked",
    "chunked\r\nTransfer-Encoding: identity",
];

//! Answers of an upstream: a head whose length is certain, and a body that is streamed.
//!
//! What must stay true: dropping a body before its end closes the connection; at its clean end a connection that is meant to
//! be used again goes back to the pool, and any other is closed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::Sleep;

use super::BodyError;
use super::connection::Connection;
use crate::net::Pool;

/// The first bytes of an answer, which say how the names of its header lines were spelled: an extension of it.
#[derive(Clone, Debug)]
pub(in crate::gateway) struct SentNames(pub(super) Bytes);

impl SentNames {
    /// The names, in their order.
    pub(in crate::gateway) fn names(&self) -> Vec<&str> {
        sent_names(&self.0)
    }
}

/// Reads the names out of the bytes of an answer, behind any interim ones. What is no header line is left out.
fn sent_names(bytes: &[u8]) -> Vec<&str> {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
    let mut names = Vec::new();
    while let Some(status) = lines.next() {
        let interim = status.get(8..).is_some_and(|code| code.trim_ascii_start().starts_with(b"1"));
        for line in lines.by_ref().take_while(|line| !line.is_empty()).filter(|_| !interim) {
            let colon = line.iter().position(|byte| *byte == b':');
            let name = colon.and_then(|at| line.get(..at)).unwrap_or_default().trim_ascii_end();
            let is_name = HeaderName::from_bytes(name).is_ok();
            names.extend(std::str::from_utf8(name).ok().filter(|_| is_name));
        }
        if !interim {
            break;
        }
    }
    names
}

/// Checks that an answer's end is certain, and leaves at most one header that says it.
///
/// hyper has read the body by the last `Transfer-Encoding`; what it cannot decode, and what two readers could take for
/// different lengths, is refused. A switch of protocols that nobody asked for is refused too.
pub(super) fn reframe(head: &mut http::response::Parts) -> Result<(), &'static str> {
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err("the upstream switches protocols unasked");
    }
    head.version = Version::HTTP_11;
    let headers = &mut head.headers;
    let codings: Vec<_> = headers.get_all(header::TRANSFER_ENCODING).iter().collect();
    let known = match codings.as_slice() {
        [] => None,
        [one] => Some(one.to_str().map(str::trim).unwrap_or_default()),
        [_, ..] => Some("several"),
    };
    match known {
        None => {}
        Some(coding) if ["chunked", "identity"].iter().any(|c| coding.eq_ignore_ascii_case(c)) => {
            headers.remove(header::TRANSFER_ENCODING);
            headers.remove(header::CONTENT_LENGTH);
        }
        Some(_) => return Err("the answer has an unknown transfer coding"),
    }
    let lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let mut lengths = lengths.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    let Some(first) = lengths.next().map(<[u8]>::trim_ascii) else { return Ok(()) };
    if !lengths.all(|length| length.trim_ascii() == first) {
        return Err("the answer has several lengths");
    }
    let length = HeaderValue::from_bytes(first).map_err(|_| "the answer's length is malformed")?;
    headers.remove(header::CONTENT_LENGTH);
    // RFC 9110, 8.6: never on a 204. On a 304, and on an answer to HEAD, it says what a GET would have got.
    if head.status != StatusCode::NO_CONTENT {
        headers.insert(header::CONTENT_LENGTH, length);
    }
    Ok(())
}

/// The body of an answer. Dropping it before its end closes the connection.
pub struct Answer {
    body: Incoming,
    connection: Option<Connection>,
    pool: Option<Arc<Pool<Connection>>>,
    idle: Idle,
    idle_limit: Option<Duration>,
}

/// The upstream was silent for too long within an answer.
#[derive(Debug, thiserror::Error)]
#[error("the upstream was silent for too long in the middle of its answer")]
pub struct Silent;

/// How long an answer's body has been waited for.
struct Idle {
    limit: Option<Duration>,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Idle {
    const fn new(limit: Option<Duration>) -> Self {
        Self { limit, waiting: None }
    }

    /// Something came, or the end.
    fn over(&mut self) {
        self.waiting = None;
    }

    /// Nothing has come: is it too long since something did? While nobody reads, nobody asks.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(limit) = self.limit else { return Poll::Pending };
        let timer = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        timer.as_mut().poll(cx)
    }
}

impl Answer {
    /// Of an answer on `connection`, which goes back to `pool` at its end.
    pub(super) fn new(
        body: Incoming,
        connection: Connection,
        pool: Option<Arc<Pool<Connection>>>,
        idle_limit: Option<Duration>,
    ) -> Self {
        let connection = Some(connection);
        let mut answer = Self { body, connection, pool, idle: Idle::new(None), idle_limit };
        answer.park_if_over();
        answer
    }

    /// From here on the body is streamed, and bounded by `answer_idle_timeout`; who reads it whole has a time-out.
    #[must_use]
    pub fn streamed(mut self) -> Self {
        self.idle = Idle::new(self.idle_limit);
        self
    }

    /// At the clean end: a pooled connection goes back, any other is closed.
    fn park_if_over(&mut self) {
        if !self.body.is_end_stream() {
            return;
        }
        self.over();
    }

    fn over(&mut self) {
        if let (Some(connection), Some(pool)) = (self.connection.take(), &self.pool) {
            connection.park(pool);
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            ready!(self.idle.poll(cx));
            tracing::info!("the upstream was silent in the middle of its answer");
            self.connection = None;
            return Poll::Ready(Some(Err(Silent.into())));
        };
        self.idle.over();
        match &frame {
            None => self.over(),
            Some(Ok(_)) => self.park_if_over(),
            Some(Err(_)) => self.connection = None,
        }
        Poll::Ready(frame.map(|result| result.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_an_answer_are_those_of_its_final_head() {
        for (bytes, names) in [
            ("HTTP/1.1 200 OK\r\nETag: a\r\nx-B:\r\n folded: no\r\n\r\nBody: no\r\n", "ETag x-B"),
            ("HTTP/1.1 103 Hints\r\nLink: a\r\n\r\nHTTP/1.1 201\r\nX-A : b\r\n\r\n", "X-A"),
            ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\nX-A: b\nX-a: c\n\nok", "X-A X-a"),
            ("HTTP/1.1 200 OK\r\nno colon\r\nX(A): b\r\nX-B: c\r\nX-Cut", "X-B"),
            ("", ""),
        ] {
            assert_eq!(sent_names(bytes.as_bytes()).join(" "), names, "{bytes:?}");
        }
    }
}

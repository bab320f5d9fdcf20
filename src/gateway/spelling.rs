//! Answers from the store with their header names spelled as they came.
//!
//! hyper's server spells names as an extension of the answer says, and only hyper's own parser can make that extension. So
//! the stored names are read once by a client connection whose other end is a buffer: all of it is ready at once, in the
//! same call, without a task and without a socket.
//!
//! Letter case has no meaning in HTTP; this is for callers that read names by their letters. Whatever goes wrong here
//! leaves the names lower-case, and nothing else.
//!
//! hyper's title case (`title_case_headers`) would be less code, and is another promise: it writes `Etag` and
//! `Www-Authenticate` where an API says `ETag` and `WWW-Authenticate`, and the replay would differ from the first answer. The
//! test `b12_headers_stay_repeated_in_order_and_raw` needs the letters as they came (`eTaG`, and `X-MANY-cases` beside
//! `x-many-CASES`), in the first answer, in a replay and after a restart.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue, Request};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::record::{Answer, encode_headers};

/// Polls that the exchange with a buffer may take; it takes two or three.
const POLLS_MAX: usize = 16;
/// More lines than an upstream's answer may have.
const LINES_MAX: usize = 2000;

/// What makes the server spell an answer's names as they came. Empty where all of them are lower-case.
pub(super) fn extensions(answer: &Answer) -> Extensions {
    if answer.spelling.is_plain() {
        return Extensions::new();
    }
    // Values say nothing here.
    let mut names = HeaderMap::with_capacity(answer.headers.keys_len());
    for name in answer.headers.iter().map(|(name, _)| name) {
        names.append(name, HeaderValue::from_static(""));
    }
    let mut head = b"HTTP/1.1 200 OK\r\n".to_vec();
    head.extend(encode_headers(&names, &answer.spelling));
    head.extend(b"Content-Length: 0\r\n\r\n");
    read(head).unwrap_or_default()
}

fn read(head: Vec<u8>) -> Option<Extensions> {
    let length = head.len();
    let exchange = async move {
        let io = TokioIo::new(Canned { head: head.into(), asked: false });
        let (mut sender, connection) = http1::Builder::new()
            .preserve_header_case(true)
            .max_headers(LINES_MAX)
            // What is kept of it lives as long as the answer does in memory.
            .read_buf_exact_size(Some(length))
            .handshake::<_, Empty<Bytes>>(io)
            .await
            .ok()?;
        let mut connection = pin!(connection);
        let answer = pin!(sender.send_request(Request::new(Empty::new())));
        tokio::select! {
            biased;
            answer = answer => answer.ok(),
            _ = async { connection.as_mut().await.ok(); std::future::pending::<()>().await } => None,
        }
    };
    let mut exchange = pin!(tokio::task::unconstrained(exchange));
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..POLLS_MAX {
        if let Poll::Ready(answer) = exchange.as_mut().poll(&mut context) {
            return answer.map(|answer| answer.into_parts().0.extensions);
        }
    }
    None
}

/// A connection whose other end has said all it has to say, and listens to nothing.
struct Canned {
    head: Bytes,
    /// An answer before its request would be none.
    asked: bool,
}

impl AsyncRead for Canned {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.asked {
            return Poll::Pending;
        }
        let length = self.head.len().min(buf.remaining());
        let part = self.head.split_to(length);
        buf.put_slice(&part);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Canned {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.asked = true;
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, StatusCode};

    use super::*;
    use crate::record::{KeptBody, Spelling};

    fn answer(names: &[&str]) -> Answer {
        let mut headers = HeaderMap::new();
        for name in names {
            let name: HeaderName = name.parse().unwrap();
            headers.append(name, HeaderValue::from_bytes(b"caf\xe9").unwrap());
        }
        let spelling = Spelling::of(&headers, names.iter().copied());
        Answer { status: StatusCode::OK, headers, spelling, body: KeptBody::NotRetained }
    }

    #[test]
    fn names_are_read_by_hypers_own_parser_where_any_of_them_needs_it() {
        assert!(extensions(&answer(&["x-plain", "etag"])).is_empty());
        assert!(!extensions(&answer(&["x-plain", "ETag"])).is_empty());
        let many: Vec<String> = (0..1000).map(|n| format!("X-Number-{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(!extensions(&answer(&many)).is_empty(), "as many lines as an answer may have");
    }
}

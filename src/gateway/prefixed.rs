//! A body of which the beginning was read already.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What was read, then the rest. The pieces are passed on as they came.
pub(super) struct Prefixed<B> {
    begun: VecDeque<Bytes>,
    rest: B,
}

impl<B> Prefixed<B> {
    pub(super) fn new(begun: Vec<Bytes>, rest: B) -> Self {
        Self { begun: begun.into(), rest }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Prefixed<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.begun.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.begun.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let begun: u64 = self.begun.iter().map(|piece| piece.len() as u64).sum();
        let mut hint = self.rest.size_hint();
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(begun));
        }
        hint.set_lower(hint.lower().saturating_add(begun));
        hint
    }
}

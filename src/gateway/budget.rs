//! The budget that keyed requests share: slots to be executed or to wait in, and bytes for the bodies held in memory.
//!
//! A keyed request acquires a [`Permit`] before its body is read, so before anything is reserved: a slot, and bytes for its
//! body and for the answer that will be read into memory, as much as its route allows. From there on nothing can run out
//! in the middle: a request that was reserved has a permit for its answer. Whatever it turns out not to need is released
//! as soon as that is known. The bytes of an answer stay acquired until its last byte is written, or until the store has it,
//! whichever is later ([`AnswerPermit`]); so neither slow callers nor a store that is away make the process grow.
//!
//! A follower has a slot of its own kind and no bytes for an answer: it shares the leader's. Many duplicates of one slow
//! request therefore never delay other requests.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::upstream::{Body, BodyError};

/// What there is to share. Clones are one budget.
#[derive(Clone)]
pub(super) struct Budget {
    in_flight: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// How many bytes there are in all.
    total: usize,
}

/// The budget is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exhausted;

/// A keyed request's share of the budget, released when it is dropped.
pub(super) struct Permit {
    budget: Budget,
    slot: Slot,
    request: OwnedSemaphorePermit,
    /// None: it waits for another one's answer, or an [`AnswerPermit`] has taken it over.
    answer: Option<OwnedSemaphorePermit>,
    answer_max: usize,
}

/// A slot, released when it is dropped.
enum Slot {
    /// It is read, executed or answered.
    InFlight { _permit: OwnedSemaphorePermit },
    /// It waits for another one's answer.
    Waiting { _permit: OwnedSemaphorePermit },
}

/// The bytes of one answer, released when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct AnswerPermit {
    _bytes: Arc<OwnedSemaphorePermit>,
}

impl Budget {
    pub(super) fn new(in_flight: usize, waiting: usize, bytes: usize) -> Self {
        let semaphore =
            |permits: usize| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
        Self {
            in_flight: semaphore(in_flight),
            waiting: semaphore(waiting),
            bytes: semaphore(kibibytes(bytes)),
            total: bytes,
        }
    }

    /// A permit for a request whose body and answer have at most this many bytes.
    pub(super) fn admit(&self, request: usize, answer_max: usize) -> Result<Permit, Exhausted> {
        let slot = Slot::InFlight { _permit: take(&self.in_flight, 1)? };
        let (request, answer) = (kibibytes(request), kibibytes(answer_max));
        // In one go: of two requests that do not both fit, one does.
        let mut request = take(&self.bytes, request.saturating_add(answer))?;
        let answer = Some(request.split(answer).ok_or(Exhausted)?);
        Ok(Permit { budget: self.clone(), slot, request, answer, answer_max })
    }
}

impl Permit {
    /// The request's body has come and has this many bytes.
    pub(super) fn received(&mut self, bytes: usize) {
        shrink(&mut self.request, bytes);
    }

    /// Changes to a slot for waiting, and releases the bytes of the answer.
    pub(super) fn wait(&mut self) -> Result<(), Exhausted> {
        if let Slot::InFlight { .. } = self.slot {
            self.slot = Slot::Waiting { _permit: take(&self.budget.waiting, 1)? };
            self.answer = None;
        }
        Ok(())
    }

    /// Changes back to a slot for execution, with bytes for an answer.
    pub(super) fn work(&mut self) -> Result<(), Exhausted> {
        if let Slot::Waiting { .. } = self.slot {
            let slot = Slot::InFlight { _permit: take(&self.budget.in_flight, 1)? };
            self.answer = Some(take(&self.budget.bytes, kibibytes(self.answer_max))?);
            self.slot = slot;
        }
        Ok(())
    }

    /// A permit for up to `most` bytes beside what was acquired, but for no more than an eighth of the budget, unless that is
    /// less than `least`; and how many bytes they are.
    pub(super) fn scratch(
        &self,
        least: usize,
        most: usize,
    ) -> (usize, Result<ScratchPermit, Exhausted>) {
        let bytes = most.min(self.budget.total / 8).max(least);
        (bytes, take(&self.budget.bytes, kibibytes(bytes)).map(ScratchPermit))
    }

    /// A permit for an answer of this many bytes: what was taken for it, cut down; for one that has waited, taken now.
    pub(super) fn answer(&mut self, bytes: usize) -> Result<AnswerPermit, Exhausted> {
        let permit = match self.answer.take() {
            Some(mut answer) => {
                shrink(&mut answer, bytes);
                answer
            }
            None => take(&self.budget.bytes, kibibytes(bytes))?,
        };
        Ok(AnswerPermit { _bytes: Arc::new(permit) })
    }
}

/// A permit for bytes that are about to be made: for as many as there may be.
pub(super) struct ScratchPermit(OwnedSemaphorePermit);

impl ScratchPermit {
    /// Releases all but what so many bytes need.
    pub(super) fn cut(mut self, bytes: usize) -> AnswerPermit {
        shrink(&mut self.0, bytes);
        AnswerPermit { _bytes: Arc::new(self.0) }
    }
}

impl AnswerPermit {
    /// A body whose first bytes, as many as were acquired, hold the permit until the last of them is written.
    pub(super) fn carry(self, body: Body, bytes: usize) -> Body {
        if bytes == 0 || body.is_end_stream() {
            return body;
        }
        AccountedBody { body, held: Some(self), left: bytes }.boxed_unsync()
    }

    fn attach(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Accounted { bytes, _held: self })
    }
}

/// Bytes with their permit.
struct Accounted {
    bytes: Bytes,
    _held: AnswerPermit,
}

impl AsRef<[u8]> for Accounted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A body that begins with bytes that hold a permit.
struct AccountedBody {
    body: Body,
    held: Option<AnswerPermit>,
    left: usize,
}

impl http_body::Body for AccountedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref().cloned());
        let (Some(data), Some(held)) = (data, self.held.clone()) else { return Poll::Ready(frame) };
        self.left = self.left.saturating_sub(data.len());
        if self.left == 0 {
            self.held = None;
        }
        Poll::Ready(Some(Ok(Frame::data(held.attach(data)))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn take(from: &Arc<Semaphore>, permits: usize) -> Result<OwnedSemaphorePermit, Exhausted> {
    let permits = u32::try_from(permits).map_err(|_| Exhausted)?;
    Arc::clone(from).try_acquire_many_owned(permits).map_err(|_| Exhausted)
}

/// Releases what is not needed for this many bytes.
fn shrink(permit: &mut OwnedSemaphorePermit, bytes: usize) {
    let excess = permit.num_permits().saturating_sub(kibibytes(bytes));
    drop(permit.split(excess));
}

/// Bytes are counted in KiB, and even nothing takes one.
fn kibibytes(bytes: usize) -> usize {
    bytes.div_ceil(1024).max(1)
}

/// Whether one request of such a route fits into this many bytes at all.
pub(super) fn fits(bytes: usize, request_max: usize, answer_max: usize) -> bool {
    kibibytes(request_max).saturating_add(kibibytes(answer_max)) <= kibibytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;

    #[test]
    fn a_request_acquires_bytes_for_its_body_and_its_answer_or_nothing() {
        let budget = Budget::new(10, 10, 10 * KIB);
        let first = budget.admit(2 * KIB, 4 * KIB).unwrap();
        assert!(budget.admit(KIB, 4 * KIB).is_err(), "its answer would not fit");
        assert!(budget.admit(KIB, 3 * KIB).is_ok(), "what was refused holds nothing");
        drop(first);
        assert!(budget.admit(5 * KIB, 5 * KIB).is_ok());
        assert!(budget.admit(6 * KIB, 5 * KIB).is_err());
        assert!(!fits(10 * KIB, 6 * KIB, 5 * KIB) && fits(10 * KIB, 5 * KIB, 5 * KIB));
    }

    #[test]
    fn what_is_not_needed_is_released_and_the_rest_stays_until_the_last_byte_goes() {
        let budget = Budget::new(10, 10, 8 * KIB);
        let mut permit = budget.admit(4 * KIB, 4 * KIB).unwrap();
        assert!(budget.admit(1, 1).is_err());
        permit.received(KIB);
        let held = permit.answer(2 * KIB).unwrap();
        drop(permit);
        assert!(budget.admit(KIB, 6 * KIB).is_err(), "the answer is still here");
        let other = held.clone();
        let written = held.attach(Bytes::from_static(b"answer"));
        let part = written.slice(5..);
        drop((written, other));
        assert!(budget.admit(KIB, 6 * KIB).is_err(), "and a part of it, too");
        drop(part);
        assert!(budget.admit(KIB, 7 * KIB).is_ok());
    }

    #[test]
    fn a_scratch_permit_is_bounded_and_shrinks_to_what_was_made() {
        let budget = Budget::new(10, 10, 80 * KIB);
        let permit = budget.admit(KIB, KIB).unwrap();
        let (bytes, scratch) = permit.scratch(KIB, 64 * KIB);
        assert_eq!(bytes, 10 * KIB);
        let held = scratch.map_err(drop).unwrap().cut(KIB);
        assert!(budget.admit(KIB, 76 * KIB).is_ok());
        assert!(budget.admit(KIB, 77 * KIB).is_err());
        drop(held);
        assert_eq!(permit.scratch(80 * KIB, KIB).1.err(), Some(Exhausted));
    }

    #[test]
    fn those_who_wait_have_slots_of_their_own_and_no_bytes_for_an_answer() {
        let budget = Budget::new(1, 1, 8 * KIB);
        let mut waiting = budget.admit(KIB, 4 * KIB).unwrap();
        assert!(budget.admit(1, 1).is_err(), "one slot");
        waiting.wait().unwrap();
        let mut working = budget.admit(KIB, 6 * KIB).unwrap();
        assert_eq!(working.wait(), Err(Exhausted), "one slot for those who wait");
        assert_eq!(waiting.work(), Err(Exhausted), "and the other one is taken");
        assert_eq!(
            waiting.answer(KIB).map(drop),
            Err(Exhausted),
            "no bytes for an answer of its own"
        );
        drop(working);
        assert_eq!(waiting.work(), Ok(()));
        assert!(waiting.answer(4 * KIB).is_ok());
        assert!(budget.admit(1, 1).is_err(), "answered, and still in its slot");
    }
}

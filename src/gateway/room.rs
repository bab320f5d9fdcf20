//! What keyed requests share: places to be worked on or to wait, and room for the bodies that are held in memory.
//!
//! A keyed request takes a [`Room`] before its body is read, so before anything is reserved: a place, and bytes for its
//! body and for the answer that will be read into memory, as much as its route allows. From there on nothing can run out
//! in the middle: a request that was reserved has room for its answer. Whatever it turns out not to need is given back
//! as soon as that is known. The bytes of an answer stay taken until its last byte is written, or until the store has it,
//! whichever is later ([`AnswerRoom`]); so neither slow callers nor a store that is away make the process grow.
//!
//! A duplicate that waits has a place of its own kind and no room for an answer: it shares the one that it waits for.
//! Many duplicates of one slow request therefore never stand in the way of other requests.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::upstream::{Body, BodyError};

/// What there is to share.
#[derive(Clone)]
pub(super) struct Limits {
    in_flight: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// How many bytes there are in all.
    total: usize,
}

/// A limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// A keyed request's share of the limits.
pub(super) struct Room {
    limits: Limits,
    place: Place,
    request: OwnedSemaphorePermit,
    /// None: it waits for another one's answer, or its own has taken it over.
    answer: Option<OwnedSemaphorePermit>,
    answer_max: usize,
}

/// A place, held until it is dropped.
enum Place {
    /// It is read, executed or answered.
    InFlight { _turn: OwnedSemaphorePermit },
    /// It waits for another one's answer.
    Waiting { _turn: OwnedSemaphorePermit },
}

/// The bytes of one answer, taken until the last holder has let go of it.
#[derive(Clone, Debug)]
pub(super) struct AnswerRoom {
    _bytes: Arc<OwnedSemaphorePermit>,
}

impl Limits {
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

    /// A place for a request whose body and answer have at most this many bytes.
    pub(super) fn admit(&self, request: usize, answer_max: usize) -> Result<Room, NoRoom> {
        let place = Place::InFlight { _turn: take(&self.in_flight, 1)? };
        let (request, answer) = (kibibytes(request), kibibytes(answer_max));
        // In one go: of two requests that do not both fit, one does.
        let mut request = take(&self.bytes, request.saturating_add(answer))?;
        let answer = Some(request.split(answer).ok_or(NoRoom)?);
        Ok(Room { limits: self.clone(), place, request, answer, answer_max })
    }
}

impl Room {
    /// The request's body has come and has this many bytes.
    pub(super) fn received(&mut self, bytes: usize) {
        shrink(&mut self.request, bytes);
    }

    /// Changes to a place among those who wait.
    pub(super) fn wait(&mut self) -> Result<(), NoRoom> {
        if let Place::InFlight { .. } = self.place {
            self.place = Place::Waiting { _turn: take(&self.limits.waiting, 1)? };
            self.answer = None;
        }
        Ok(())
    }

    /// Changes back to a place among those who are worked on, with room for an answer.
    pub(super) fn work(&mut self) -> Result<(), NoRoom> {
        if let Place::Waiting { .. } = self.place {
            let place = Place::InFlight { _turn: take(&self.limits.in_flight, 1)? };
            self.answer = Some(take(&self.limits.bytes, kibibytes(self.answer_max))?);
            self.place = place;
        }
        Ok(())
    }

    /// Room for up to `most` bytes beside what was taken, but for no more than an eighth of all there is, unless that is less
    /// than `least`; and how many bytes they are.
    pub(super) fn borrow(&self, least: usize, most: usize) -> (usize, Result<Loan, NoRoom>) {
        let bytes = most.min(self.limits.total / 8).max(least);
        (bytes, take(&self.limits.bytes, kibibytes(bytes)).map(Loan))
    }

    /// Room for an answer of this many bytes: what was taken for it, cut down; for one that has waited, taken now.
    pub(super) fn answer(&mut self, bytes: usize) -> Result<AnswerRoom, NoRoom> {
        let permit = match self.answer.take() {
            Some(mut answer) => {
                shrink(&mut answer, bytes);
                answer
            }
            None => take(&self.limits.bytes, kibibytes(bytes))?,
        };
        Ok(AnswerRoom { _bytes: Arc::new(permit) })
    }
}

/// Room for bytes that are about to be made: for as many as there may be.
pub(super) struct Loan(OwnedSemaphorePermit);

impl Loan {
    /// So many there are.
    pub(super) fn cut(mut self, bytes: usize) -> AnswerRoom {
        shrink(&mut self.0, bytes);
        AnswerRoom { _bytes: Arc::new(self.0) }
    }
}

impl AnswerRoom {
    /// A body whose first bytes, as many as the room was taken for, keep the room until the last of them is written.
    pub(super) fn carry(self, body: Body, bytes: usize) -> Body {
        if bytes == 0 || body.is_end_stream() {
            return body;
        }
        Carried { body, held: Some(self), left: bytes }.boxed_unsync()
    }

    fn attach(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Roomed { bytes, _held: self })
    }
}

/// Bytes with their room.
struct Roomed {
    bytes: Bytes,
    _held: AnswerRoom,
}

impl AsRef<[u8]> for Roomed {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A body that begins with bytes that hold room.
struct Carried {
    body: Body,
    held: Option<AnswerRoom>,
    left: usize,
}

impl http_body::Body for Carried {
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

fn take(from: &Arc<Semaphore>, permits: usize) -> Result<OwnedSemaphorePermit, NoRoom> {
    let permits = u32::try_from(permits).map_err(|_| NoRoom)?;
    Arc::clone(from).try_acquire_many_owned(permits).map_err(|_| NoRoom)
}

/// Gives back what is not needed for this many bytes.
fn shrink(permit: &mut OwnedSemaphorePermit, bytes: usize) {
    let excess = permit.num_permits().saturating_sub(kibibytes(bytes));
    drop(permit.split(excess));
}

/// Room is counted in KiB, and even nothing takes one.
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
    fn a_request_takes_room_for_its_body_and_its_answer_or_nothing() {
        let limits = Limits::new(10, 10, 10 * KIB);
        let first = limits.admit(2 * KIB, 4 * KIB).unwrap();
        assert!(limits.admit(KIB, 4 * KIB).is_err(), "its answer would not fit");
        assert!(limits.admit(KIB, 3 * KIB).is_ok(), "what was refused holds nothing");
        drop(first);
        assert!(limits.admit(5 * KIB, 5 * KIB).is_ok());
        assert!(limits.admit(6 * KIB, 5 * KIB).is_err());
        assert!(!fits(10 * KIB, 6 * KIB, 5 * KIB) && fits(10 * KIB, 5 * KIB, 5 * KIB));
    }

    #[test]
    fn what_is_not_needed_is_given_back_and_the_rest_stays_until_the_last_byte_goes() {
        let limits = Limits::new(10, 10, 8 * KIB);
        let mut room = limits.admit(4 * KIB, 4 * KIB).unwrap();
        assert!(limits.admit(1, 1).is_err());
        room.received(KIB);
        let held = room.answer(2 * KIB).unwrap();
        drop(room);
        assert!(limits.admit(KIB, 6 * KIB).is_err(), "the answer is still here");
        let other = held.clone();
        let written = held.attach(Bytes::from_static(b"answer"));
        let part = written.slice(5..);
        drop((written, other));
        assert!(limits.admit(KIB, 6 * KIB).is_err(), "and a part of it, too");
        drop(part);
        assert!(limits.admit(KIB, 7 * KIB).is_ok());
    }

    #[test]
    fn what_is_borrowed_is_bounded_and_cut_to_what_was_made() {
        let limits = Limits::new(10, 10, 80 * KIB);
        let room = limits.admit(KIB, KIB).unwrap();
        let (bytes, loan) = room.borrow(KIB, 64 * KIB);
        assert_eq!(bytes, 10 * KIB);
        let held = loan.map_err(drop).unwrap().cut(KIB);
        assert!(limits.admit(KIB, 76 * KIB).is_ok());
        assert!(limits.admit(KIB, 77 * KIB).is_err());
        drop(held);
        assert_eq!(room.borrow(80 * KIB, KIB).1.err(), Some(NoRoom));
    }

    #[test]
    fn those_who_wait_have_places_of_their_own_and_no_room_for_an_answer() {
        let limits = Limits::new(1, 1, 8 * KIB);
        let mut waiting = limits.admit(KIB, 4 * KIB).unwrap();
        assert!(limits.admit(1, 1).is_err(), "one place");
        waiting.wait().unwrap();
        let mut working = limits.admit(KIB, 6 * KIB).unwrap();
        assert_eq!(working.wait(), Err(NoRoom), "one place for those who wait");
        assert_eq!(waiting.work(), Err(NoRoom), "and the other one is taken");
        assert_eq!(waiting.answer(KIB).map(drop), Err(NoRoom), "no room for an answer of its own");
        drop(working);
        assert_eq!(waiting.work(), Ok(()));
        assert!(waiting.answer(4 * KIB).is_ok());
        assert!(limits.admit(1, 1).is_err(), "answered, and still in its place");
    }
}

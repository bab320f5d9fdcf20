//! Questions about attempts whose end nobody knows: who may ask, and what "not found" makes of a question.
//!
//! Whoever asks holds the record as whoever executes it does, under the very attempt that is in doubt. So what still comes of
//! that attempt (a late answer, an outcome in a spill, the application's own completion) completes the record while the
//! question is under way, and the asker finds that out when it acts on its answer. What must stay true:
//!
//! - A question is never sent and never released: the attempt may have executed. Dropped, it is unknown again.
//! - Only "not found" makes a reservation of it ([`Desk::raise`]): the next attempt, written by one statement that needs the
//!   record to be held as it was before the question was asked. Nothing can have come in between.
//! - A raise of which nobody knows whether it was committed is taken back, and the scope's entry stays until then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::inquiry::{Held, Inquiry, Step};
use super::{Ask, Desk, Lead, Owes, POLL_FIRST, Readers, Reservation, Seat, Underway};
use crate::record::event::RecordContext;
use crate::record::{Fence, RecordId};
use crate::route::{Lookup, OnUnknown};
use crate::store::{Asker, Changed, Due, Error, Proposal, Takeover};
use crate::telemetry::causes;

/// The right to ask the upstream about an attempt that is unknown.
pub(in crate::gateway) struct Question {
    underway: Box<Underway>,
    lookup: Arc<Lookup>,
    /// What was kept of the request of that very attempt: a retry's may name something else.
    context: Option<Bytes>,
}

impl Question {
    /// How it is asked.
    pub(in crate::gateway) fn lookup(&self) -> &Lookup {
        &self.lookup
    }

    /// What is asked about.
    pub(in crate::gateway) fn about(&self) -> RecordContext<'_> {
        let Underway { scope, fence, .. } = &*self.underway;
        RecordContext { record: fence.id, scope, context: self.context.as_deref() }
    }

    /// What was kept of the request, for the events of what is found.
    pub(in crate::gateway) fn context(&self) -> Option<Bytes> {
        self.context.clone()
    }

    /// The attempt, to be completed with what was found, or lost again.
    pub(in crate::gateway) fn asked(self) -> Box<Underway> {
        self.underway
    }
}

/// What came of "not found".
pub(in crate::gateway) enum Raised {
    /// The next attempt may be sent.
    Held(Reservation),
    /// Nothing was changed: somebody else has the record, or has completed it, or this process has its late answer; or nothing
    /// new is reserved now.
    Not(Question),
    /// Nobody knows; nothing is sent, and it is taken back.
    Doubt(RecordId),
}

impl Desk {
    /// Takes an unknown record, to ask the upstream about it; `None`: somebody works on it, or may not be asked yet.
    pub(in crate::gateway) async fn question(
        &self,
        due: &Due,
        lookup: &Arc<Lookup>,
    ) -> Option<Question> {
        let ask = Ask {
            scope: due.scope.clone(),
            fingerprint: due.fingerprint,
            caller: due.caller.clone(),
            readers: Readers::Scope,
            context: None,
            on_unknown: OnUnknown::Hold,
            // What stands in the row stays.
            retention: Duration::ZERO,
            // A question begins nothing.
            owes: Owes::Nothing,
        };
        let Seat::Lead(mut lead) = self.seat(&ask) else { return None };
        let from = Takeover::Question(due.fence, lookup.delay, Asker::Gateway);
        let step = Inquiry::new(self, &ask, &mut lead).take_over(from, due.fingerprint).await;
        match step {
            Step::Held(held) => Some(self.asks(held, &ask, lead, lookup, due.context.clone())),
            Step::Doubt(debt) => {
                self.settler.owe(*debt, Some(lead));
                None
            }
            Step::Asks { .. }
            | Step::Replay(_)
            | Step::Unknown(..)
            | Step::Refuse(_)
            | Step::Again
            | Step::Wait(_) => None,
        }
    }

    /// A question about a record that is held for it.
    pub(super) fn asks(
        &self,
        held: Held,
        ask: &Ask,
        lead: Lead,
        lookup: &Arc<Lookup>,
        context: Option<Bytes>,
    ) -> Question {
        let underway = self.reservation(&held, ask, lead).in_doubt();
        Question { underway, lookup: Arc::clone(lookup), context }
    }

    /// The upstream knows nothing of the attempt that was asked about: goes on to the next one for this retry, if the record
    /// is still held as it was when the question was asked.
    pub(in crate::gateway) async fn raise(&self, mut question: Question, ask: &Ask) -> Raised {
        if question.underway.is_answered() {
            return Raised::Not(question);
        }
        if self.settler.spill().is_full() {
            self.settler.spill().refused();
            return Raised::Not(question);
        }
        if self.is_swamped(ask) {
            self.metrics.outbox_refused();
            return Raised::Not(question);
        }
        let underway = &mut question.underway;
        let fence = underway.fence;
        let proposal = Proposal {
            id: fence.id,
            scope: underway.scope.clone(),
            fingerprint: underway.fingerprint,
            owner: underway.owner,
            caller: ask.caller.as_ref().map(ToString::to_string),
            context: ask.context.clone(),
            retention: ask.retention,
        };
        underway.raise(self.settings.doubt_window);
        match self.write_raise(&proposal, fence).await {
            Some(true) => Raised::Held(question.underway.raised(Arc::new(proposal))),
            Some(false) => {
                underway.not_raised();
                Raised::Not(question)
            }
            None => Raised::Doubt(fence.id),
        }
    }

    /// Whether it is written; `None`: nobody knows.
    async fn write_raise(&self, proposal: &Proposal, fence: Fence) -> Option<bool> {
        let deadline = Instant::now() + self.settings.reserve_timeout;
        let mut doubt = false;
        loop {
            let error = match self.store.raise(proposal.clone(), fence).await {
                Ok(Changed::Yes) => return Some(true),
                Ok(Changed::No) => return (!doubt).then_some(false),
                // The application may be completing the attempt right now.
                Ok(Changed::Locked) => None,
                Err(error) => Some(error),
            };
            doubt |= matches!(error, Some(Error::InDoubt(_)));
            if let Some(error) = &error {
                tracing::warn!(error = %causes(error), doubt, "the next attempt could not be written");
            }
            let over = Instant::now() >= deadline;
            if over || (error.is_some() && !doubt) {
                return (!doubt).then_some(false);
            }
            // The same again, until the lost one holds the row no more: what it finds then is the truth.
            tokio::time::sleep(POLL_FIRST).await;
        }
    }
}
